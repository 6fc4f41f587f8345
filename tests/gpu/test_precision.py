"""What half precision and CUDA graphs change: a little, and nothing."""

from __future__ import annotations

import warnings
from collections import defaultdict
from typing import Any

import pytest
import torch

from graftlm.kernels.gpu.linear import batch_invariant_matmul
from graftlm.kernels.gpu.linear.batch_invariant_matmul import LARGE, MANY_ROWS, SMALL, ProductTile, product
from graftlm.kernels.linear_kernels import OneOrder
from graftlm.kernels.wire_plan import WirePlan
from tests.gpu.device import GREEDY, NEW, SHAPES, family, on_gpu, relative, replace_forward
from tests.models import random_prompt, tiny_model

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", SHAPES)
def test_bfloat16_logits_of_prefill_and_decode_are_near_those_of_float32(kind: str) -> None:
    """The reference has the same rounded weights; 2e-2 is what some forty roundings to eight bits add up to."""
    prompt = random_prompt(150)
    steps: list[torch.Tensor] = []

    def record(runner: Any, plan: WirePlan) -> torch.Tensor:
        logits: torch.Tensor = type(runner).forward(runner, plan)
        steps.append(logits.float().cpu())
        return logits

    with on_gpu(kind, torch.bfloat16) as runtime:
        replace_forward(runtime, record)
        answer = runtime.generate(prompt, **GREEDY).token_ids
    reference = tiny_model(kind).bfloat16().float()
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    found = torch.cat(steps)[:NEW]
    assert torch.isfinite(found).all()
    assert relative(found, expected) < 2e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3", "gpt2"])
def test_replaying_a_graph_computes_what_running_eagerly_does(kind: str, dtype: torch.dtype) -> None:
    """Eight rows have a graph of their own size, so both take the same kernels; five are padded."""
    differences: dict[int, list[float]] = {}

    def compare(runner: Any, plan: WirePlan) -> torch.Tensor:
        assert runner.graphs, "nothing was captured"
        replayed = type(runner).forward(runner, plan).clone()
        if plan.is_decode:
            eager = runner.eager.forward(plan)
            differences.setdefault(plan.num_rows, []).append(relative(replayed, eager))
        return replayed

    with on_gpu(kind, dtype) as runtime:
        replace_forward(runtime, compare)
        runtime.generate(family(8), **GREEDY)
        runtime.generate(family(5), **GREEDY)
    assert max(differences[8]) == 0.0
    assert max(differences[5]) < (1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("kind", SHAPES)
def test_strict_answers_in_bfloat16_depend_neither_on_the_batch_nor_on_the_cache(kind: str) -> None:
    """Or the model is named when it is loaded; those of plain linear layers never are."""
    prompts = family(7, shared=90) + [random_prompt(23, seed=5)]
    options = GREEDY | {"max_tokens": 40}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with on_gpu(kind, torch.bfloat16, strict=True) as runtime:
            alone = []
            for prompt in prompts:
                runtime.clear_cache()
                alone.append(runtime.generate(prompt, **options).token_ids)
            cached = [runtime.generate(prompt, **options).token_ids for prompt in prompts]
            runtime.clear_cache()
            batched = [c.token_ids for c in runtime.generate(prompts, **options)]
            again = [c.token_ids for c in runtime.generate(prompts, **options)]
        with on_gpu(kind, torch.bfloat16, strict=True, max_step_tokens=16) as runtime:
            chunked = [c.token_ids for c in runtime.generate(prompts, **options)]
    if any("strict=True does not hold" in str(warning.message) for warning in said):
        assert kind not in ("llama", "qwen3", "mistral")
        return
    assert cached == alone
    assert batched == alone
    assert again == alone
    assert chunked == alone


def test_large_steps_of_a_strict_runtime_take_large_tiles_where_those_give_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, weight = (torch.randn(n, 4096, device="cuda", dtype=torch.bfloat16) for n in (200, 300))
    agree = torch.equal(product(x, weight, None, SMALL), product(x, weight, None, LARGE))
    monkeypatch.setattr(OneOrder, "make", lambda *_: None)  # as on a card that is no Hopper
    kernel = batch_invariant_matmul._product  # as in a new process, whose dry calls launch nothing:
    monkeypatch.setattr(kernel, "device_caches", defaultdict(kernel.create_binder))
    with on_gpu("llama", torch.bfloat16, strict=True) as runtime:
        runtime.load()
        tiles: list[ProductTile] = []

        def note(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tile: ProductTile) -> torch.Tensor:
            tiles.extend([tile] if len(x) >= MANY_ROWS else [])
            return product(x, weight, bias, tile)

        monkeypatch.setattr(batch_invariant_matmul, "product", note)
        runtime.generate(random_prompt(2 * MANY_ROWS), **GREEDY)
    assert set(tiles) == {LARGE if agree else SMALL}
