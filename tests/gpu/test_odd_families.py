"""Families that no kernel takes whole load and answer as transformers does, in bfloat16 too."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.device import GREEDY, NEW, family, on_gpu
from tests.models import greedy_reference, tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::UserWarning")]

# What a warning says of these, the serial lane or steps without CUDA graphs, is not asked here.
KINDS = ["bloom", "gptj", "mamba2", "gemma4", "granitemoe", "phimoe"]
"""Attention of their own, norms with gates, heads of several sizes, experts whose tokens rounding exchanges."""


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_equal_transformers(kind: str) -> None:
    prompts = family(3)
    with on_gpu(kind) as runtime:
        found = [answer.token_ids for answer in runtime.generate(prompts, **GREEDY)]
    assert found == [greedy_reference(tiny_model(kind), prompt, NEW) for prompt in prompts]


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_answers(kind: str) -> None:
    with on_gpu(kind, torch.bfloat16) as runtime:
        assert [len(answer.token_ids) for answer in runtime.generate(family(3), **GREEDY)] == [NEW] * 3
        if kind.endswith("moe"):
            assert runtime.stats().execution.startswith("paged"), runtime.stats().execution
