"""The architectures of GGUF files: their configurations and the names of their tensors in transformers.

llama.cpp's converter renames tensors and changes three things, which `Family` states: rows of queries and keys are
permuted, norms hold w + 1, and defaults of a configuration are not in the metadata.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from graftlm.core.errors import ModelError
from graftlm.core.model.gguf.reader import GgufFile

Config = dict[str, Any]

_STACK = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
"""Names of a layer's tensors that most architectures share."""

_NORMS_AROUND = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

_PLACE = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")

UNUSED = frozenset({"rope_freqs", "rope_factors_long", "rope_factors_short"})
"""Tensors that are part of the configuration."""


@dataclass(frozen=True)
class Family:
    """An architecture of llama.cpp.

    model_type  transformers' name
    extend      adds to the common configuration what the architecture alone has
    names       the layer's tensors whose names differ from most architectures'
    permuted    whether rows of queries and keys are in the order of interleaved rotary pairs
    plus_one    whether norms hold w + 1
    """

    model_type: str
    extend: Callable[[GgufFile, Config], Config] = lambda file, config: {}
    names: dict[str, str] = field(default_factory=dict)
    permuted: bool = False
    plus_one: bool = False

    def module(self, tensor: str) -> str | None:
        """Return the name in transformers of a tensor ("blk.3.attn_q.weight"); None if it has no place."""
        place = _PLACE.fullmatch(tensor)
        if place is None:
            return None
        layer, leaf, suffix = place.groups()
        found = (_LAYER | self.names if layer is not None else _STACK).get(leaf)
        if layer is None:
            return f"{found}.{suffix}" if found is not None else None
        return f"model.layers.{layer}.{found}.{suffix}" if found is not None else None


def family_of(file: GgufFile) -> Family:
    """Return the family of a file's architecture. Raises ModelError for one that is not known."""
    name = file.architecture
    if name == "llama" and file.get("expert_count"):
        name = "mixtral"
    if name not in FAMILIES:
        known = ", ".join(sorted(set(FAMILIES) - {"mixtral"}))
        raise ModelError(
            f"{str(file.paths[0])!r} has the architecture {name!r}; GGUF files of {known} are read: use the model's "
            "Hugging Face files"
        )
    return FAMILIES[name]


def configuration(file: GgufFile) -> Config:
    """Return transformers' configuration of a file. Raises ModelError for an unknown architecture or missing keys."""
    family = family_of(file)
    try:
        config = _common(file) | {"model_type": family.model_type}
        config |= family.extend(file, config)
        _check_rotation(file, config)
        return config
    except KeyError as error:
        raise ModelError(
            f"{str(file.paths[0])!r} has no metadata {error.args[0]!r}, which {file.architecture!r} needs; convert the "
            "model again with a current llama.cpp"
        ) from error


def _check_rotation(file: GgufFile, config: Config) -> None:
    """Raise ModelError if a part of a head rotates that transformers' model would rotate whole."""
    rotated = file.get("rope.dimension_count") or config["head_dim"]
    if "partial_rotary_factor" not in config and rotated != config["head_dim"]:
        raise ModelError(
            f"{str(file.paths[0])!r} rotates {rotated} of {config['head_dim']} values of a head "
            f"('{file.architecture}.rope.dimension_count'), which is not supported for {file.architecture!r}; use the "
            "model's Hugging Face files"
        )


def _needed(file: GgufFile, key: str) -> Any:
    value = file.metadata[f"{file.architecture}.{key}"]
    if isinstance(value, list):  # a number for each layer
        if len(set(value)) > 1:
            raise ModelError(
                f"layers of {str(file.paths[0])!r} differ in {key}: {value[:4]} ...; that is not supported"
            )
        value = value[0]
    return value


def _common(file: GgufFile) -> Config:
    heads, hidden = _needed(file, "attention.head_count"), _needed(file, "embedding_length")
    has = file.tensors.__contains__
    if not has("token_embd.weight"):
        raise ModelError(
            f"{str(file.paths[0])!r} has no tensor 'token_embd.weight', which every model has; it is incomplete: "
            "download it again"
        )
    key = "attention.layer_norm_rms_epsilon"
    config: Config = {
        "max_position_embeddings": _needed(file, "context_length"),
        "hidden_size": hidden,
        "num_hidden_layers": _needed(file, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _needed(file, "attention.head_count_kv")
        if file.get("attention.head_count_kv")
        else heads,
        "head_dim": file.get("attention.key_length") or hidden // heads,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": not has("output.weight"),
        "attention_bias": has("blk.0.attn_q.bias"),
        "mlp_bias": has("blk.0.ffn_up.bias"),
        "rope_parameters": rope(file),
        "bos_token_id": file.token_id("bos"),
        "eos_token_id": file.token_id("eos"),
        "pad_token_id": file.token_id("padding"),
        "dtype": dtype_name(file),
    }
    if file.get("feed_forward_length"):
        config["intermediate_size"] = _needed(file, "feed_forward_length")
    if file.get(key):
        config["rms_norm_eps"] = file.get(key)
    return config


def dtype_name(file: GgufFile) -> str:
    """Return the dtype that the model computes in: that of plain matrices, bfloat16 for quantised ones."""
    kinds = {info.kind.name for info in file.tensors.values() if len(info.shape) > 1}
    if kinds <= {"F32"}:
        return "float32"
    return "float16" if kinds <= {"F32", "F16"} else "bfloat16"


# -- rotary embeddings ---------------------------------------------------------------------------------------------


def rope(file: GgufFile) -> Config:
    """Return transformers' parameters of the rotary embedding.

    llama.cpp keeps the scaling of Llama 3 and of Phi as factors of the frequencies, in tensors.
    """
    theta = float(file.get("rope.freq_base", 10_000.0))
    plain: Config = {"rope_type": "default", "rope_theta": theta}
    kind, factor = file.get("rope.scaling.type"), file.get("rope.scaling.factor") or file.get("rope.scale_linear")
    original = file.get("rope.scaling.original_context_length")
    factors = file.floats("rope_freqs.weight")
    if factors is not None:
        _check_factors(file, factors)
        return plain | _by_factors(file, factors, theta)
    if kind == "linear" or (kind is None and factor):
        return plain | ({"rope_type": "linear", "factor": float(factor)} if factor else {})
    if kind == "yarn" and (not factor or not original):
        raise ModelError(
            f"{str(file.paths[0])!r} scales its rotary embedding by 'yarn' with the factor {factor!r} over a context "
            f"of {original!r}, which lacks a number; convert the model again with a current llama.cpp"
        )
    if kind == "yarn":
        scaled = {"rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": int(original)}
        for name in ("beta_fast", "beta_slow"):
            if file.get(f"rope.scaling.yarn_{name}") is not None:
                scaled[name] = float(file.get(f"rope.scaling.yarn_{name}"))
        whole, times = file.get("rope.scaling.yarn_attn_factor"), file.get("rope.scaling.attn_factor")
        if whole:
            scaled["attention_factor"] = float(whole)
        elif times:  # beside the factor that follows from the scaling
            scaled["attention_factor"] = float(times) * (1 + 0.1 * math.log(float(factor)))
        return plain | scaled
    if kind not in (None, "none", "longrope"):
        raise ModelError(f"{str(file.paths[0])!r} scales its rotary embedding by {kind!r}, which is not supported")
    return plain


def _check_factors(file: GgufFile, factors: npt.NDArray[np.float32]) -> None:
    """Raise ModelError for factors that are not one positive number for each pair of values of a head."""
    rotated = file.get("rope.dimension_count") or file.get("attention.key_length")
    expected = rotated or _needed(file, "embedding_length") // _needed(file, "attention.head_count")
    if factors.shape != (expected // 2,) or not (np.isfinite(factors) & (factors > 0)).all():
        raise ModelError(
            f"the factors of the rotary embedding in {str(file.paths[0])!r} are {factors[:4].tolist()} ... "
            f"{list(factors.shape)}, expected {expected // 2} numbers above 0; it is damaged: download it again"
        )


def _by_factors(file: GgufFile, factors: npt.NDArray[np.float32], theta: float) -> Config:
    """Return the parameters that divide frequencies by `factors`: Llama 3's if they are, else the factors."""
    frequencies = theta ** -(np.arange(len(factors)) / len(factors))
    factor, low, high, original = float(factors.max()), 1.0, 4.0, 8192
    turns = original * frequencies / (2 * math.pi)  # in the original context
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    if np.allclose(1 / ((1 - smooth) / factor + smooth), factors, rtol=1e-4):
        return {
            "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
            "original_max_position_embeddings": original,
        }  # fmt: skip
    return {
        "rope_type": "longrope", "factor": 1.0, "attention_factor": 1.0,
        "original_max_position_embeddings": _needed(file, "context_length"),
        "short_factor": factors.tolist(), "long_factor": factors.tolist(),
    }  # fmt: skip


# -- families ------------------------------------------------------------------------------------------------------


def _llama(file: GgufFile, config: Config) -> Config:
    return {"head_dim": file.get("attention.key_length") or file.get("rope.dimension_count") or config["head_dim"]}


def _experts(file: GgufFile, config: Config) -> Config:
    return {
        "num_experts": file.get("expert_count"),
        "num_experts_per_tok": file.get("expert_used_count"),
        "moe_intermediate_size": file.get("expert_feed_forward_length"),
        "norm_topk_prob": file.architecture != "qwen2moe",
        "shared_expert_intermediate_size": file.get("expert_shared_feed_forward_length"),
    }


def _mixtral(file: GgufFile, config: Config) -> Config:
    count, used = file.get("expert_count"), file.get("expert_used_count")
    return {"num_local_experts": count, "num_experts_per_tok": used, "sliding_window": None}


def _gemma(file: GgufFile, config: Config) -> Config:
    return {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh"}


def _scaled_by(config: Config, largest: int) -> int:
    """Return the divisor of Gemma's queries, which is not in a file: that of heads, but for the 27B's."""
    by_hidden = config["num_hidden_layers"] == largest
    return int(config["hidden_size"] // config["num_attention_heads"] if by_hidden else config["head_dim"])


def _gemma2(file: GgufFile, config: Config) -> Config:
    return _gemma(file, config) | {
        "sliding_window": file.get("attention.sliding_window"),
        "attn_logit_softcapping": file.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": file.get("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _scaled_by(config, 46),
    }


def _gemma3(file: GgufFile, config: Config) -> Config:
    every = int(file.get("attention.sliding_window_pattern", 6))
    kinds = ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(config["num_hidden_layers"])]
    local = {"rope_type": "default", "rope_theta": float(file.get("rope.freq_base_swa", 10_000.0))}
    return _gemma(file, config) | {
        "sliding_window": file.get("attention.sliding_window"),
        "layer_types": kinds,
        "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": local},
        "query_pre_attn_scalar": _scaled_by(config, 62),
        "attn_logit_softcapping": file.get("attn_logit_softcapping"),
        "final_logit_softcapping": file.get("final_logit_softcapping"),
    }


def _phi3(file: GgufFile, config: Config) -> Config:
    turned = file.get("rope.dimension_count", config["head_dim"]) / config["head_dim"]
    found: Config = {
        "sliding_window": file.get("attention.sliding_window") or None,
        "rope_parameters": config["rope_parameters"] | {"partial_rotary_factor": turned},
        "partial_rotary_factor": turned,
    }
    long, short = file.floats("rope_factors_long.weight"), file.floats("rope_factors_short.weight")
    if long is not None and short is not None:
        _check_factors(file, long)
        _check_factors(file, short)
        original = int(file.get("rope.scaling.original_context_length", config["max_position_embeddings"]))
        found["original_max_position_embeddings"] = original
        found["rope_parameters"] |= {
            "rope_type": "longrope", "long_factor": long.tolist(), "short_factor": short.tolist(),
            "original_max_position_embeddings": original,
        }  # fmt: skip
        if file.get("rope.scaling.attn_factor"):
            found["rope_parameters"]["attention_factor"] = float(file.get("rope.scaling.attn_factor"))
    return found


def _granite(file: GgufFile, config: Config) -> Config:
    return _llama(file, config) | {
        "embedding_multiplier": file.get("embedding_scale", 1.0),
        "residual_multiplier": file.get("residual_scale", 1.0),
        "attention_multiplier": file.get("attention.scale", config["head_dim"] ** -0.5),
        "logits_scaling": file.get("logit_scale", 1.0),
    }


def _cohere(file: GgufFile, config: Config) -> Config:
    return {
        "layer_norm_eps": file.get("attention.layer_norm_epsilon", 1e-5),
        "logit_scale": file.get("logit_scale", 0.0625),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
    }


def _gpt_oss(file: GgufFile, config: Config) -> Config:
    kinds = ["full_attention" if i % 2 else "sliding_attention" for i in range(config["num_hidden_layers"])]
    return {
        "num_local_experts": file.get("expert_count"),
        "num_experts_per_tok": file.get("expert_used_count"),
        "intermediate_size": file.get("expert_feed_forward_length"),
        "sliding_window": file.get("attention.sliding_window"),
        "layer_types": kinds,
        "rope_parameters": {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False} | config["rope_parameters"],
    }


_GATED = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}

_AFTER = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}

FAMILIES: dict[str, Family] = {
    "llama": Family("llama", _llama, permuted=True),
    "mixtral": Family("mixtral", _mixtral, permuted=True),
    "qwen2": Family("qwen2"),
    "qwen3": Family("qwen3"),
    "qwen2moe": Family("qwen2_moe", _experts, _GATED),
    "qwen3moe": Family("qwen3_moe", _experts),
    "gemma": Family("gemma", _gemma, plus_one=True),
    "gemma2": Family("gemma2", _gemma2, _NORMS_AROUND, plus_one=True),
    "gemma3": Family("gemma3_text", _gemma3, _NORMS_AROUND, plus_one=True),
    "phi3": Family("phi3", _phi3, {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
    "olmo2": Family("olmo2", names=_AFTER),
    "granite": Family("granite", _granite, permuted=True),
    "smollm3": Family("smollm3", permuted=True),
    "command-r": Family("cohere", _cohere),
    "gpt-oss": Family(
        "gpt_oss",
        _gpt_oss,
        {
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.router",
            "attn_sinks": "self_attn.sinks",
        },
    ),
}
"""The architectures that are read, by llama.cpp's names; "mixtral" is a "llama" with experts."""
