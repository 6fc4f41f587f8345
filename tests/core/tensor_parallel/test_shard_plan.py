"""How models are cut: parts of all ranks make up the whole, and what cannot be cut is refused with both numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import graftlm as gl
from graftlm.core.config import EngineConfig
from graftlm.core.tensor_parallel.crew import check_ranks
from graftlm.core.tensor_parallel.shard_plan import Piece, ShardPlan
from tests.models import tiny_model


def test_parts_of_all_ranks_are_the_whole() -> None:
    tensor = torch.arange(48.0).view(8, 6)
    assert torch.equal(torch.cat([Piece("columns", 0).of(tensor, rank, 4) for rank in range(4)]), tensor)
    assert torch.equal(torch.cat([Piece("rows", 1).of(tensor, rank, 3) for rank in range(3)], 1), tensor)
    packed = [Piece("columns", 0, (1, 1)).of(tensor, rank, 2) for rank in range(2)]
    assert torch.equal(torch.cat([packed[0][:2], packed[1][:2], packed[0][2:], packed[1][2:]]), tensor)
    assert torch.equal(sum(Piece("first").of(tensor, rank, 2) for rank in range(2)), tensor)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "kind",
    [
        "llama",
        "qwen2",
        "qwen3",
        "mixtral",
        "qwen3_moe",
        "gemma2",
        "deepseek_v3",
        "gpt_oss",
        "phi3",
        "glm4",
        "qwen2_moe",
    ],
)
def test_the_configuration_of_a_shard_has_the_shapes_of_the_parts(kind: str) -> None:
    config = tiny_model(kind).config
    plan = ShardPlan.of(kind, config, 2)
    assert any(piece.cut == "rows" for piece in plan.pieces.values()) and plan.sums
    assert config.num_attention_heads == tiny_model(kind).config.num_attention_heads  # the own one is unchanged


def test_transposed_experts_without_a_plan_of_transformers_are_cut_with_their_biases_and_sinks() -> None:
    plan = ShardPlan.of("gpt_oss", tiny_model("gpt_oss").config, 2)
    of = {name: plan.piece(f"model.layers.0.{name}") for name in ("self_attn.sinks", "self_attn.o_proj.bias")}
    of |= {name: plan.piece(f"model.layers.0.mlp.experts.{name}") for name in ("gate_up_proj", "gate_up_proj_bias")}
    of |= {name: plan.piece(f"model.layers.0.mlp.experts.{name}") for name in ("down_proj", "down_proj_bias")}
    assert list(of.values()) == [
        Piece("columns", 0), Piece("first"), Piece("columns", 2), Piece("columns", 1), Piece("rows", 1), Piece("first"),
    ]  # fmt: skip


def test_an_expert_of_a_checkpoint_is_cut_as_the_merged_ones() -> None:
    plan = ShardPlan.of("mixtral", tiny_model("mixtral").config, 2)
    name = "model.layers.0.block_sparse_moe.experts.3.{}.weight"
    assert plan.piece(name.format("w1")) == plan.piece(name.format("w3")) == Piece("columns", 0)
    assert plan.piece(name.format("w2")) == Piece("rows", 1)
    assert plan.piece("model.layers.0.block_sparse_moe.gate.weight").cut == "whole"


def test_what_cannot_be_cut_is_refused_with_both_numbers() -> None:
    config = tiny_model("llama").config
    with pytest.raises(gl.ConfigError, match=r"tensor_parallel is 3, but a has 2 KV heads.*use 1 or 2"):
        ShardPlan.of("a", config, 3)
    narrow = tiny_model("llama", intermediate_size=65).config
    with pytest.raises(gl.ConfigError, match=r"tensor_parallel is 2, but intermediate_size of a is 65"):
        ShardPlan.of("a", narrow, 2)
    with pytest.raises(gl.ConfigError, match="no plan to cut a .gpt2."):
        ShardPlan.of("a", tiny_model("gpt2").config, 2)
    with pytest.raises(gl.ConfigError, match="for a .nemotron_h. leaves every layer whole"):
        ShardPlan.of("a", tiny_model("nemotron_h").config, 2)


def test_layers_with_other_heads_than_the_model_are_cut_by_their_own() -> None:
    config = tiny_model("gemma4", num_key_value_heads=4, num_global_key_value_heads=2, attention_k_eq_v=True).config
    layers = ShardPlan.of("a", config, 2).hf_config.per_layer_config
    assert [(layer.num_key_value_heads, layer.num_attention_heads) for layer in layers] == [(2, 2), (1, 2)]
    with pytest.raises(gl.ConfigError, match="tensor_parallel is 4, but a has 2 KV heads"):
        ShardPlan.of("a", config, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loader": "other"}, "loader='other'"),
        ({"quantization": "bnb-4bit"}, "quantization='bnb-4bit'"),
        ({"trust_remote_code": True}, "own code"),
        ({"tensor_parallel": 64}, "tensor_parallel is 64, but sprout has 6 KV heads"),
    ],
)
def test_options_that_ranks_do_not_have_are_refused_before_a_process_starts(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(gl.ConfigError, match=message):
        check_ranks("sprout", EngineConfig(**{"tensor_parallel": 2, "device": "cpu", **options}))


def test_a_loaded_model_is_refused() -> None:
    with pytest.raises(gl.ConfigError, match="give its name or folder"):
        check_ranks(tiny_model("llama"), EngineConfig(tensor_parallel=2, device="cpu"))
