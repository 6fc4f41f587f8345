"""The self-test tells rounding from errors: with the experts and heads of published mixtures, in bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from graftlm.core.config import EngineConfig
from graftlm.core.execution.layer_replay import LayerReplay
from graftlm.core.execution.routing import Chosen, RoutingReplay
from graftlm.core.model.load import _read, load_model
from graftlm.core.model.qualify import Reference, _Ragged, discover
from graftlm.kernels.cpu.attention.backend import TorchAttention
from tests.models import byte_tokenizer, tiny_model

LAYERS = 2
KINDS: dict[str, dict[str, Any]] = {
    "gpt_oss": {
        "num_attention_heads": 64, "num_key_value_heads": 8, "num_local_experts": 32, "num_experts": 32,
        "num_experts_per_tok": 4, "sliding_window": 16, "intermediate_size": 48,
        "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
    },
    "qwen3_moe": {
        "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128, "num_local_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 24,
    },
}  # fmt: skip
"""Heads, experts and experts of a token as published; other sizes small."""


def mixture(kind: str) -> PreTrainedModel:
    """A model whose layers change the residual stream about as much as it is large, so that rounding adds up."""
    model = tiny_model(kind, num_hidden_layers=LAYERS, hidden_size=128, head_dim=16, **KINDS[kind])
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
    for layer in model.model.layers:
        layer.mlp.experts.down_proj.data *= 8  # as large an addend as that of the attention
        if hasattr(layer.self_attn, "sinks"):
            layer.self_attn.sinks.data = 1.0 + torch.randn(64, generator=generator)
    return model.bfloat16()


def verdict(
    kind: str,
    plant: Callable[[PreTrainedModel], None] = lambda model: None,
    attention: type[TorchAttention] = TorchAttention,
) -> str | None:
    """Compare the layers of a model with an error that was planted after its own forward."""
    config = EngineConfig(device="cpu", dtype="bfloat16")
    loaded = _read(mixture(kind), config, byte_tokenizer(), torch.device("cpu"), None)
    reference = Reference.of(loaded)
    plant(loaded.model)
    found = discover(loaded.model, loaded.device)
    loaded.layers, loaded.layer_of = found.layers, found.layer_of
    replay = LayerReplay(loaded.model, loaded.model.model.layers, reference.layers)
    return _Ragged(loaded, reference, attention, compact=False).compare_layers(replay)


class Rounded(TorchAttention):
    """Rounds to a bit less than bfloat16 has, as another order of sums may."""

    def forward(self, layer: int, q: Any, k: Any, v: Any, plan: Any, params: Any) -> torch.Tensor:
        out = super().forward(layer, q, k, v, plan, params)
        return (1.01 * out.float()).bfloat16().float().div(1.01).bfloat16()


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_that_moves_tokens_to_other_experts_is_no_error(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[int] = []
    choose = RoutingReplay.choose

    def counted(self: RoutingReplay, chosen: Chosen, route: Any) -> Chosen:
        replayed = choose(self, chosen, route)
        moved.append(int((replayed[0] != chosen[0]).any(-1).sum()))
        return replayed

    monkeypatch.setattr(RoutingReplay, "choose", counted)
    assert verdict(kind, attention=Rounded) is None
    assert sum(moved) > 0


class WithoutWindow(TorchAttention):
    def forward(self, layer: int, q: Any, k: Any, v: Any, plan: Any, params: Any) -> torch.Tensor:
        return super().forward(layer, q, k, v, plan, replace(params, window=None))


class WithoutSinks(TorchAttention):
    def forward(self, layer: int, q: Any, k: Any, v: Any, plan: Any, params: Any) -> torch.Tensor:
        return super().forward(layer, q, k, v, plan, replace(params, sinks=None))


class OneKeyLate(TorchAttention):
    """Attends in the last layer alone to keys that are turned by one position too many."""

    def forward(self, layer: int, q: Any, k: Any, v: Any, plan: Any, params: Any) -> torch.Tensor:
        keys = k.roll(1, 0) if layer == LAYERS - 1 else k
        return super().forward(layer, q, keys, v, plan, params)


@pytest.mark.parametrize("attention", [WithoutWindow, WithoutSinks, OneKeyLate])
def test_an_error_of_the_attention_is_found(attention: type[TorchAttention]) -> None:
    assert verdict("gpt_oss", attention=attention) is not None


def exchange_experts(model: PreTrainedModel) -> None:
    experts = model.model.layers[0].mlp.experts
    experts.down_proj.data = experts.down_proj.data.roll(1, 0)


def turn_faster(model: PreTrainedModel) -> None:
    model.model.rotary_emb.inv_freq *= 2


def exchange_routes(model: PreTrainedModel) -> None:
    mlp = model.model.layers[LAYERS - 1].mlp
    router = mlp.router if hasattr(mlp, "router") else mlp.gate
    router.weight.data = router.weight.data.roll(1, 0)


def weigh_otherwise(model: PreTrainedModel) -> None:
    mlp = model.model.layers[1].mlp
    router = mlp.router if hasattr(mlp, "router") else mlp.gate
    router.weight.data *= 2  # the order of the scores is what it was


@pytest.mark.parametrize("plant", [exchange_experts, turn_faster, exchange_routes, weigh_otherwise])
@pytest.mark.parametrize("kind", KINDS)
def test_an_error_of_a_module_is_found(kind: str, plant: Callable[[PreTrainedModel], None]) -> None:
    assert verdict(kind, plant) is not None


@pytest.mark.parametrize(("scale", "stacked"), [(1.0, True), (1.5, False)])
def test_one_call_for_a_mixture_is_compared_with_its_layers(
    scale: float, stacked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounding moves tokens of a deep mixture to other experts, and the stack cannot replay the model's choice."""
    sizes = {"num_experts": 128, "num_local_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 24}
    model = tiny_model("qwen3_moe", num_hidden_layers=4, hidden_size=128, **sizes)
    for layer in model.model.layers:
        layer.mlp.experts.down_proj.data *= 8
    monkeypatch.setattr("graftlm.core.fusion.decoder_stack._scale_of", lambda embedding: scale)
    loaded = load_model(model.bfloat16(), EngineConfig(device="cpu", dtype="bfloat16"), byte_tokenizer())
    assert loaded.execution.startswith("paged, 4 of 4 layers fused")
    assert (loaded.stack is not None) == stacked
    assert loaded.error is not None
    assert loaded.error > 6e-2
    loaded.release()


def test_a_cap_of_scores_that_the_models_attention_ignores_is_no_error() -> None:
    """The attention `sdpa` of some versions of transformers ignores the cap of Gemma 2, and so does this one."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def uncapped(*args: Any, **options: Any) -> Any:
        return sdpa_attention_forward(*args, **options | {"softcap": None})

    AttentionInterface.register("uncapped", uncapped)
    AttentionMaskInterface.register("uncapped", AttentionMaskInterface()["sdpa"])
    model = tiny_model("gemma2", query_pre_attn_scalar=1)
    model.config._attn_implementation_internal = "uncapped"
    loaded = load_model(model, EngineConfig(device="cpu"), byte_tokenizer())
    assert loaded.lane == "paged", loaded.lane_reason
