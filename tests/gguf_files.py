"""GGUF files of tiny models, written as llama.cpp's converter writes them: what tests read instead of downloads."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedModel

from graftlm.core.model.gguf.reader import BLOCK_TYPES
from tests.models import CHAT_TEMPLATE, EOS, IM_END, SPECIALS, byte_tokenizer, tiny_model

Raw = tuple[npt.NDArray[Any], str]
"""An array of float32, or the bytes of blocks [outputs, bytes], with the name of its type."""

_CODES = {kind.name: number for number, kind in BLOCK_TYPES.items()}
_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp", "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp", "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.router": "ffn_gate_inp", "self_attn.sinks": "attn_sinks",
}  # fmt: skip
_AROUND = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_AFTER_ATTENTION = {"post_attention_layernorm": "post_attention_norm"}
_OWN_NAMES = {"gemma2": _AROUND, "gemma3": _AROUND, "olmo2": _AROUND, "gpt-oss": _AFTER_ATTENTION}


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Raw], *, alignment: int = 32) -> Path:
    """Write a file. Integers are uint32; shapes of quantised tensors follow from their bytes."""
    head, data = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))], b""
    for key, value in metadata.items():
        head += [_string(key), _value(value)]
    for name, (array, kind) in tensors.items():
        shape = list(array.shape)
        if array.dtype == np.uint8:
            block = BLOCK_TYPES[_CODES[kind]]
            shape[-1] = shape[-1] // block.num_bytes * block.size
        head.append(_string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1]))
        head.append(struct.pack("<IQ", _CODES[kind], len(data)))
        raw = np.ascontiguousarray(array).tobytes()
        data += raw + bytes(-len(raw) % alignment)
    whole = b"".join(head)
    path.write_bytes(whole + bytes(-len(whole) % alignment) + data)
    return path


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Any) -> bytes:
    if isinstance(value, list):
        element = _value(value[0])[:4]
        return struct.pack("<I", 9) + element + struct.pack("<Q", len(value)) + b"".join(_value(x)[4:] for x in value)
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    return struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<I", 8) + _string(value)


def metadata_of(model: PreTrainedModel, architecture: str) -> dict[str, Any]:
    """The metadata that llama.cpp's converter writes for a tiny model with the byte tokenizer."""
    config: Any = model.config
    tokenizer: Any = byte_tokenizer()
    tokens = [str(tokenizer.convert_ids_to_tokens(i)) for i in range(len(tokenizer))]
    rope = config.rope_parameters
    theta = rope.get("rope_theta") or rope["full_attention"]["rope_theta"]
    own = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(theta),
        "rope.dimension_count": config.head_dim,
    }
    return {
        "general.architecture": architecture,
        **{f"{architecture}.{key}": value for key, value in own.items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIALS else 1 for token in tokens],
        "tokenizer.ggml.bos_token_id": int(tokenizer.bos_token_id),
        "tokenizer.ggml.eos_token_id": EOS,
        "tokenizer.ggml.eot_token_id": IM_END,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def tensors_of(model: PreTrainedModel, architecture: str) -> dict[str, Raw]:
    """A model's tensors in float32 under llama.cpp's names, as its converter changes them."""
    config: Any = model.config
    names = _NAMES | _OWN_NAMES.get(architecture, {})
    found: dict[str, Raw] = {}
    for name, tensor in model.state_dict().items():
        value: npt.NDArray[Any] = tensor.float().numpy()
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        layer = ""
        if name.startswith("model.layers."):
            _, _, number, name = name.split(".", 3)
            layer = f"blk.{number}."
        if ".experts." in name:
            found |= {layer + key: (part, "F32") for key, part in _experts(name, value, architecture).items()}
            continue
        stem, _, suffix = name.rpartition(".") if name.endswith((".weight", ".bias")) else (name, "", "weight")
        if architecture in ("llama", "granite", "smollm3") and stem in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = config.num_attention_heads if "q_proj" in stem else config.num_key_value_heads
            value = value.reshape(heads, 2, -1, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
        if architecture.startswith("gemma") and stem.endswith("norm"):
            value = value + 1
        found[f"{layer}{names[stem]}.{suffix}"] = value, "F32"
    return found


def _experts(name: str, value: npt.NDArray[Any], architecture: str) -> dict[str, npt.NDArray[Any]]:
    suffix = "bias" if name.endswith("_bias") else "weight"
    if architecture == "gpt-oss" and suffix == "weight":
        value = value.swapaxes(1, 2)
    if "down_proj" in name:
        return {f"ffn_down_exps.{suffix}": value}
    gate, up = (value[:, ::2], value[:, 1::2]) if architecture == "gpt-oss" else np.split(value, 2, 1)
    return {f"ffn_gate_exps.{suffix}": gate, f"ffn_up_exps.{suffix}": up}


def tiny_gguf(path: Path, model: PreTrainedModel, architecture: str = "llama", **extra: Any) -> Path:
    """Write the file of a tiny model; `extra` is metadata of the architecture, with "__" for "."."""
    own = {f"{architecture}.{key.replace('__', '.')}": value for key, value in extra.items()}
    return write_gguf(path, metadata_of(model, architecture) | own, tensors_of(model, architecture))


def coded(path: Path, seed: int = 0, intermediate_size: int = 96) -> Path:
    """Write a llama whose matrices are random blocks of Q8_0."""
    model = tiny_model("llama", hidden_size=64, intermediate_size=intermediate_size, seed=seed)
    random = np.random.default_rng(seed)
    tensors: dict[str, Any] = {}
    for name, (array, kind) in tensors_of(model, "llama").items():
        if array.ndim == 2:
            blocks = random.integers(0, 256, (len(array), array.shape[1] // 32, 34), np.uint8)
            blocks[:, :, :2] = np.full(blocks.shape[:2], 0.0005, np.float16)[..., None].view(np.uint8)
            array, kind = blocks.reshape(len(array), -1), "Q8_0"
        tensors[name] = array, kind
    return write_gguf(path, metadata_of(model, "llama"), tensors)
