"""Experts with gathered weights compute what they do otherwise, and are put back."""

from __future__ import annotations

import pytest
import torch

from graftlm.core.execution import cuda_graphs
from graftlm.core.execution.cuda_graphs import GatheredExperts
from tests.models import tiny_model

IDS = torch.arange(3, 20)[None]


@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_moe", "mixtral"])
def test_gathered_experts_compute_the_same_and_are_put_back(kind: str) -> None:
    model = tiny_model(kind)
    before = model.get_experts_implementation()
    with torch.inference_mode():
        expected = model(IDS, use_cache=False).logits
        with GatheredExperts(model)():
            assert model.get_experts_implementation() != before
            found = model(IDS, use_cache=False).logits
    assert model.get_experts_implementation() == before
    assert float((found - expected).norm() / expected.norm()) < 1e-5


def test_as_many_tokens_go_through_them_as_their_weights_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("mixtral")  # 64 to 96 and back, gated: 3 x 64 x 96 weights of four bytes, two experts a token
    monkeypatch.setattr(cuda_graphs, "MAX_GATHERED", 5 * 2 * 3 * 64 * 96 * 4 + 1)
    assert GatheredExperts(model).max_tokens == 5


def test_a_model_without_experts_gathers_nothing() -> None:
    assert GatheredExperts(tiny_model("llama")).max_tokens == 0
