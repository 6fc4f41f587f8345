"""The published configurations of common models, as arguments of AutoConfig.for_model; for random weights.

`fitted` cuts a configuration to as many layers as a card holds.
"""

from __future__ import annotations

from typing import Any

from bench.gpu.shapes import SHAPES, Shape


def _dense(
    kind: str, hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, vocabulary: int, **more: Any
) -> Shape:
    return {
        "model_type": kind, "hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocabulary,
        "max_position_embeddings": 32_768, "tie_word_embeddings": False, **more,
    }  # fmt: skip


def _latent(q_rank: int | None, nope: int = 128, value: int = 128) -> Shape:
    return {
        "q_lora_rank": q_rank, "kv_lora_rank": 512, "qk_nope_head_dim": nope, "qk_rope_head_dim": 64,
        "v_head_dim": value, "first_k_dense_replace": 1,
    }  # fmt: skip


def _experts(count: int, chosen: int, size: int, shared: int = 1, **more: Any) -> Shape:
    return {
        "num_experts": count, "num_local_experts": count, "n_routed_experts": count, "num_experts_per_tok": chosen,
        "moe_intermediate_size": size, "n_shared_experts": shared, "norm_topk_prob": True, **more,
    }  # fmt: skip


def _gemma4(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, **more: Any) -> Shape:
    own = {"sliding_window": 1024, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, **more}
    return _dense(
        "gemma4_text", hidden, mlp, layers, heads, kv_heads, 262_144, head_dim=256, global_head_dim=512,
        final_logit_softcapping=30.0, vocab_size_per_layer_input=262_144, **own | {"tie_word_embeddings": True},
    )  # fmt: skip


_LINEAR = ["linear_attention"] * 3 + ["full_attention"]

PUBLISHED: dict[str, Shape] = {
    "llama-3.1-8b": SHAPES["llama3-8b"],
    "llama-3.2-1b": SHAPES["llama3-1b"],
    "qwen2.5-7b": _dense("qwen2", 3584, 18_944, 28, 28, 4, 152_064, rope_theta=1e6),
    "qwen3-8b": SHAPES["qwen3-8b"],
    "qwen3-32b": _dense("qwen3", 5120, 25_600, 64, 64, 8, 151_936, head_dim=128, rope_theta=1e6),
    "qwen3-30b-a3b": SHAPES["qwen3-moe"] | {"num_hidden_layers": 48},
    "qwen3-next-80b-a3b": _dense(
        "qwen3_next", 2048, 5120, 48, 16, 2, 151_936, head_dim=256, layer_types=_LINEAR * 12,
        shared_expert_intermediate_size=512, **_experts(512, 10, 512),
    ),
    "qwen3.5-9b": _dense("qwen3_5_text", 4096, 12_288, 32, 16, 4, 248_320, head_dim=256, layer_types=_LINEAR * 8),
    "gpt-oss-20b": SHAPES["gpt-oss-20b"],
    "gpt-oss-120b": SHAPES["gpt-oss-20b"] | {"num_hidden_layers": 36, "num_local_experts": 128},
    "gemma-2-9b": SHAPES["gemma2-9b"],
    "gemma-3-4b": SHAPES["gemma3-4b"],
    "gemma-3-27b": _dense(
        "gemma3_text", 5376, 21_504, 62, 32, 16, 262_208, head_dim=128, sliding_window=1024, query_pre_attn_scalar=168,
        tie_word_embeddings=True,
    ),
    "gemma-4-31b": _gemma4(5376, 21_504, 60, 32, 16, num_global_key_value_heads=4, attention_k_eq_v=True),
    "gemma-4-26b-a4b": _gemma4(
        2816, 2112, 30, 16, 8, num_global_key_value_heads=2, attention_k_eq_v=True, enable_moe_block=True,
        num_experts=128, top_k_experts=8, moe_intermediate_size=704,
    ),
    "gemma-4-e4b": _gemma4(
        2560, 10_240, 42, 8, 2, sliding_window=512, num_kv_shared_layers=18, hidden_size_per_layer_input=256
    ),
    "mistral-7b": _dense("mistral", 4096, 14_336, 32, 32, 8, 32_768, head_dim=128, sliding_window=None),
    "mistral-nemo-12b": _dense("mistral", 5120, 14_336, 40, 32, 8, 131_072, head_dim=128, sliding_window=None),
    "mixtral-8x7b": _dense("mixtral", 4096, 14_336, 32, 32, 8, 32_000, num_local_experts=8, num_experts_per_tok=2),
    "phi-4-mini": SHAPES["phi4-mini"],
    "phi-4": _dense("phi3", 5120, 17_920, 40, 40, 10, 100_352, pad_token_id=0),
    "deepseek-v2-lite": SHAPES["deepseek-v2-lite"],
    "deepseek-v3": _dense(
        "deepseek_v3", 7168, 18_432, 61, 128, 128, 129_280, head_dim=64, n_group=8, topk_group=4,
        routed_scaling_factor=2.5, **_latent(1536), **_experts(256, 8, 2048),
    ),
    "kimi-k2": _dense(
        "deepseek_v3", 7168, 18_432, 61, 64, 64, 163_840, head_dim=64, n_group=1, topk_group=1,
        routed_scaling_factor=2.827, **_latent(1536), **_experts(384, 8, 2048),
    ),
    "glm-4.5-air": _dense(
        "glm4_moe", 4096, 10_944, 46, 96, 8, 151_552, head_dim=128, partial_rotary_factor=0.5, n_group=1, topk_group=1,
        first_k_dense_replace=1, attention_bias=True, **_experts(128, 8, 1408),
    ),
    "glm-4.7-flash": _dense(
        "glm4_moe_lite", 2048, 10_240, 47, 20, 20, 154_880, head_dim=64, n_group=1, topk_group=1,
        routed_scaling_factor=1.8, **_latent(768, 192, 256), **_experts(64, 4, 1536),
    ),
    "olmo-3-7b": _dense("olmo3", 4096, 11_008, 32, 32, 32, 100_278, sliding_window=4096),
    "granite-3.3-8b": _dense(
        "granite", 4096, 12_800, 40, 32, 8, 49_159, attention_multiplier=0.0078125, embedding_multiplier=12.0,
        residual_multiplier=0.22, logits_scaling=16.0, tie_word_embeddings=True,
    ),
    "lfm2-1.2b": _dense(
        "lfm2", 2048, 12_288, 16, 32, 8, 65_536,
        layer_types=["conv", "conv", "full_attention"] * 5 + ["conv"],
    ),
    "smollm3-3b": _dense("smollm3", 2048, 11_008, 36, 16, 4, 128_256, pad_token_id=0, tie_word_embeddings=True),
    "minimax-m2": _dense(
        "minimax_m2", 3072, 1536, 62, 48, 8, 200_064, head_dim=128, rotary_dim=64, use_qk_norm=True,
        **_experts(256, 8, 1536),
    ),
    "llama-4-scout": _dense(
        "llama4_text", 5120, 8192, 48, 40, 8, 202_048, head_dim=128, intermediate_size_mlp=16_384, num_local_experts=16,
        num_experts_per_tok=1, interleave_moe_layer_step=1,
    ),
    "ernie-4.5-21b-a3b": _dense(
        "ernie4_5_moe", 2560, 12_288, 28, 20, 4, 103_424, moe_num_experts=64, moe_k=6, moe_num_shared_experts=2,
        moe_intermediate_size=1536, moe_layer_start_index=1,
    ),
    "seed-oss-36b": _dense("seed_oss", 5120, 27_648, 64, 80, 8, 155_136, head_dim=128),
    "exaone-4-32b": _dense("exaone4", 5120, 27_392, 64, 40, 8, 102_400, head_dim=128, sliding_window=4096),
}  # fmt: skip
"""Sizes as published; fields that say nothing about shapes are left to transformers."""


def fitted(shape: Shape, num_layers: int) -> Shape:
    """Return a configuration of the first `num_layers` layers."""
    fields: Shape = {"num_hidden_layers": num_layers}
    if "layer_types" in shape:
        fields["layer_types"] = shape["layer_types"][:num_layers]
    if "num_kv_shared_layers" in shape:  # the last layers share K and V, as many of these as of all
        fields["num_kv_shared_layers"] = shape["num_kv_shared_layers"] * num_layers // shape["num_hidden_layers"]
    return shape | fields


def layers_that_fit(shape: Shape, num_bytes: int) -> int:
    """Return the number of layers, at most the published one, whose weights in two bytes a number take `num_bytes`.

    Raises ValueError if two layers take more.
    """
    published = int(shape["num_hidden_layers"])
    few, more = bytes_of(shape, 2), bytes_of(shape, 4)
    if few > num_bytes:
        raise ValueError(f"2 of its layers take {few / 1e9:.0f} GB, and {num_bytes / 1e9:.0f} GB are free")
    return min(published, 2 + int(2 * (num_bytes - few) / (more - few)))


def bytes_of(shape: Shape, num_layers: int) -> int:
    """Return the bytes of the weights of the first `num_layers` layers, in two bytes a number; none is allocated."""
    return 2 * _numbers(fitted(shape, num_layers))


def _numbers(shape: Shape) -> int:
    """Return the number of weights of a configuration; none is allocated."""
    import torch
    from transformers import AutoModelForCausalLM

    from bench.gpu.shapes import config_of

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(shape, tiny=False))
    return sum(parameter.numel() for parameter in model.parameters())
