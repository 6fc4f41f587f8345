"""Experts with gathered weights compute what they do otherwise, and are put back."""

from __future__ import annotations

import pytest
import torch

from graftlm.core.execution import cuda_graphs
from graftlm.core.execution.cuda_graphs import GatheredExperts
from graftlm.core.execution.routing import Routing, RoutingRecorder, RoutingReplay
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


def test_experts_of_a_layer_beside_its_mlp_are_recorded_and_replayed_by_their_router() -> None:
    sizes = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32}
    model = tiny_model("gemma4", hidden_size_per_layer_input=0, **sizes)
    recorder = RoutingRecorder(model)
    with torch.inference_mode(), recorder():
        expected = model(IDS, use_cache=False).logits
    recorded = recorder.per_mixture(1)
    assert [routing.experts.shape for routing in recorded] == [(IDS.shape[1], 2)] * 2
    replay = RoutingReplay(model, recorded)
    with torch.inference_mode(), replay(range(IDS.shape[1])):
        found = model(IDS, use_cache=False).logits
    assert replay.problem() is None
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("step", "explained"), [(2.0**-9, True), (1.0, False)])
def test_weights_that_jump_are_replayed_and_the_router_is_tested_for_them(step: float, explained: bool) -> None:
    """PhiMoE gives an expert a weight of 1 or of 0.5, by whether another's score is below a threshold."""
    x = torch.full((8, 4), 1.0).bfloat16()
    experts, weights = torch.tensor([[0, 1]]).repeat(8, 1), torch.tensor([[1.0, 1.0]]).repeat(8, 1)

    def route(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        above = x[:, 0].float() > 1.0 - step
        jump = torch.where(above, 0.5, 1.0)[:, None].expand(-1, 2)
        return torch.tensor([[1, 0]]).repeat(len(x), 1), jump

    replay = RoutingReplay(tiny_model("llama"), [Routing(x, experts, weights)])
    replay._tokens = torch.arange(8)
    found = replay.choose(route(x), route)
    assert torch.equal(found[0], experts)
    assert torch.equal(found[1], weights)
    assert (replay.problem() is None) == explained
