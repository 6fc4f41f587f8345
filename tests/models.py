"""Tiny random models of many architectures, and what they answer: what the tests run on instead of downloads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import GenerationConfig, PreTrainedModel

from graftlm.testing.byte_tokenizer import (
    BOS as BOS,
    CHAT_TEMPLATE as CHAT_TEMPLATE,
    EOS as EOS,
    IM_END as IM_END,
    IM_START as IM_START,
    PAD as PAD,
    SPECIALS as SPECIALS,
    byte_tokenizer as byte_tokenizer,
)
from graftlm.testing.random_model import VOCAB_SIZE as VOCAB_SIZE, random_model

TURNED_PAGED = ["gptj", "codegen"] if Version(transformers.__version__) >= Version("5.24") else []
"""Architectures that attend through the interface of transformers from 5.24 on, and before in a way of their own."""

_MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "shared_expert_intermediate_size": 32,
    "decoder_sparse_step": 1,
}
_MLA: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
_WITH_EXPERTS = {
    "mixtral",
    "gpt_oss",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "qwen3_next",
    "llama4_text",
    "minimax",
    "jamba",
}
_WITH_LATENTS = {"glm4_moe_lite", "youtu", "longcat_flash", "kimi_linear", "bailing_hybrid", "glm_moe_dsa"}
_WITH_WINDOW = {
    "mistral",
    "gemma2",
    "gemma3_text",
    "gemma4_text",
    "gpt_oss",
    "cohere2",
    "olmo3",
    "ministral",
    "exaone4",
    "smollm3",
}
_LINEAR_ATTENTION = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_OWN: dict[str, dict[str, Any]] = {
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"], **_LINEAR_ATTENTION},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"], **_LINEAR_ATTENTION},
    "qwen3_5_moe_text": {"layer_types": ["linear_attention", "full_attention"], **_LINEAR_ATTENTION},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 16},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
    },
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "lru_width": 64},
    "kimi_linear": {
        "layer_types": ["linear_attention", "full_attention"],
        "num_key_value_heads": 4,
        "linear_num_heads": 4,
        "linear_head_dim": 16,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "moe_intermediate_size": 32,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "bailing_hybrid": {
        "layer_types": ["linear_attention", "full_attention"],
        "num_key_value_heads": 4,
        "linear_num_heads": 4,
        "linear_head_dim": 16,
        "num_experts": 8,
        "num_experts_per_token": 2,
        "num_expert_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "head_dim": 8,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"], **_LINEAR_ATTENTION},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "smollm3": {"use_sliding_window": True},
    "deepseek_v3": {"head_dim": 8},
    "youtu": {"head_dim": 8},
    "longcat_flash": {
        "head_dim": 8,
        "num_layers": 1,
        "ffn_hidden_size": 64,
        "expert_ffn_hidden_size": 32,
        "moe_topk": 2,
    },
    "gptj": {"rotary_dim": 8},
    "codegen": {"rotary_dim": 8},
}
"""What makes the tiny configuration of a kind valid, quick, or show its peculiarity."""
FIXED = {kind: {"head_dim"} for kind, fields in _OWN.items() if "head_dim" in fields}
"""Fields of a kind that depend on others of its tiny configuration."""
_WITHOUT_HEAD_DIM = {"falcon", "dbrx"}
_ALIASES = {"gemma3": "gemma3_text", "gemma4": "gemma4_text", "llama4": "llama4_text", "hunyuan": "hunyuan_v1_dense"}


def tiny_model(kind: str = "llama", seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Build a random two-layer model of any Hugging Face architecture, in float32, ready to generate.

    `kind` is a `model_type` ("llama", "qwen3", "gemma3", "gpt2", "bloom", ...); `overrides` go to its config.
    Weights are wide enough that greedy decoding does not sit on ties. Equal arguments give equal weights.
    """
    kind = _ALIASES.get(kind, kind)
    options: dict[str, Any] = {} if kind in _WITHOUT_HEAD_DIM else {"head_dim": 16}
    if "moe" in kind or kind in _WITH_EXPERTS:
        options.update(_MOE)
    if kind.startswith("deepseek") or kind in _WITH_LATENTS:
        options.update(_MLA)
    if kind in _WITH_WINDOW:
        options["sliding_window"] = 8
        if kind not in ("mistral", "ministral"):
            options["layer_types"] = ["sliding_attention", "full_attention"]
    options.update(_OWN.get(kind, {}))
    options.update(overrides)
    return random_model(kind, seed, **options)


def greedy_reference(model: PreTrainedModel, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What `model.generate` answers greedily, one prompt alone, exactly `num_tokens` tokens, whatever they are."""
    own, ids = model.generation_config, torch.tensor([list(prompt)])
    model.generation_config = GenerationConfig(pad_token_id=PAD)  # knows no end of text: nothing stops or is masked
    try:
        with torch.inference_mode():  # a mask of its own: PAD is a word of other vocabularies
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False
            )
    finally:
        model.generation_config = own
    return [int(token) for token in output[0, len(prompt) :]]


def random_prompt(length: int, seed: int = 0) -> list[int]:
    """Byte tokens, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return [int(token) for token in torch.randint(3, 250, (length,), generator=generator)]
