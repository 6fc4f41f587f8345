"""Steps of many new tokens, whose keys and values are laid out densely on a Hopper GPU, give the logits of float32."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

from graftlm.core.config import CacheConfig
from graftlm.core.execution.cuda_graphs import WIDE
from graftlm.core.runtime import Runtime
from graftlm.kernels.hopper.prompt_layout import MIN_TOKENS
from graftlm.kernels.wire_plan import WirePlan
from tests.gpu.device import family, relative, replace_forward, sequences_of
from tests.models import byte_tokenizer, random_prompt, tiny_model

pytestmark = pytest.mark.gpu


def model(kind: str, dim: int) -> Any:
    return tiny_model(kind, head_dim=dim, max_position_embeddings=6000).bfloat16()


LONG = max(WIDE[-1], MIN_TOKENS) + 100
"""New tokens of a step that no graph takes."""


@pytest.mark.parametrize("kv", ["auto", "model"])
@pytest.mark.parametrize(("kind", "dim"), [("llama", 128), ("qwen3", 128), ("llama", 64)])
def test_logits_are_near_those_of_float32(kind: str, dim: int, kv: Any) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    steps: list[tuple[list[int], torch.Tensor]] = []
    laid_out: list[int] = []

    def record(runner: Any, plan: WirePlan) -> torch.Tensor:
        logits: torch.Tensor = type(runner).forward(runner, plan)
        of_row = np.searchsorted(plan.ends, plan.logits_rows, side="right").tolist()
        steps.extend(
            (list(sequence.tokens[: plan.rows[index].kv_len]), x.float().cpu())
            for index, sequence, x in zip(of_row, sequences_of(runtime, plan, of_row), logits, strict=True)
        )
        layout = runner.attention.prompts._layout
        if plan.num_tokens >= MIN_TOKENS and layout is not None:
            laid_out.append(layout.num_tokens)
        return logits

    start, end = random_prompt(900, seed=7), random_prompt(LONG, seed=8)
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache = CacheConfig(max_tokens=16_384, dtype=kv)
        with Runtime(
            model(kind, dim), tokenizer=byte_tokenizer(), cache=cache, max_batch=8, device="cuda", max_step_tokens=8192
        ) as runtime:
            replace_forward(runtime, record)
            for _ in range(2):  # the first result of a kind is compared with the plain way's, which is given
                runtime.generate(random_prompt(LONG, seed=len(steps)), **options)  # nothing cached
                runtime.generate(start, **options)
                runtime.generate(start + end, **options)  # behind cached tokens
                runtime.generate(family(8, shared=700, own=500), **options)  # the first of them computes what all share
                runtime.clear_cache()
            attention = runtime._thread.engine.runner.attention
            assert attention.prompts.enabled and attention.prompts._checked
    assert len(laid_out) >= 6
    reference = model(kind, dim).float()
    with torch.inference_mode():
        expected = [reference(torch.tensor([tokens])).logits[0, -1] for tokens, _ in steps]
    found = [logits for _, logits in steps]
    assert relative(torch.stack(found), torch.stack(expected)) < 2e-2
    # transformers' own forward in bfloat16 is up to 1.98e-2 away in one row of eleven, 1.4e-2 in all together
    assert max(map(relative, found, expected)) < 3e-2
