"""One set of weights for all engines: a folder of transformers, a GGUF file, and OpenVINO's form."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from bench.models import SHAPES, Size
from graftlm.kernels.jit import python_process
from tests.models import byte_tokenizer, tiny_model

Precision = Literal["float32", "bfloat16"]

EXPORT = """
import sys
from optimum.exporters.openvino import main_export
from optimum.intel.openvino.configuration import OVConfig
folder, output, kind = sys.argv[1:]
main_export(folder, output, task="text-generation-with-past", ov_config=OVConfig(dtype=kind), convert_tokenizer=False)
"""


def write_random(size: Size, folder: Path) -> Path:
    """Write a random Llama shape with float32 weights. -> its folder"""
    target = folder / size
    if not (target / "config.json").exists():
        target.mkdir(parents=True, exist_ok=True)
        byte_tokenizer().save_pretrained(target)
        shape = SHAPES[size] | {"max_position_embeddings": 16_384}  # for prompts of 8,000 tokens
        tiny_model("llama", **shape).to(torch.float32).save_pretrained(target)
    return target


FAMILIES: dict[str, dict[str, Any]] = {
    "Gemma 3": {
        "kind": "gemma3_text", "hidden_size": 1152, "num_hidden_layers": 18, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 256, "intermediate_size": 6912, "vocab_size": 32_000,
        "sliding_window": 512, "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
        "query_pre_attn_scalar": 256, "max_position_embeddings": 16_384, "tie_word_embeddings": True,
    },
    "8 of 64 experts": {
        "kind": "qwen3_moe", "hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 16,
        "num_key_value_heads": 4, "head_dim": 64, "moe_intermediate_size": 384,
        "num_experts": 64, "num_local_experts": 64,  # two versions' names
        "num_experts_per_tok": 8, "norm_topk_prob": True, "vocab_size": 32_000, "max_position_embeddings": 16_384,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
"""Shapes of families by label: layers as Gemma 3 1B has them, and a mixture in the form of Qwen3 30B-A3B."""


def write_family(label: str, folder: Path) -> Path:
    """Write a shape of `FAMILIES` with random bfloat16 weights. -> its folder"""
    target = folder / label.replace(" ", "-")
    if not (target / "config.json").exists():
        target.mkdir(parents=True, exist_ok=True)
        byte_tokenizer().save_pretrained(target)
        tiny_model(**FAMILIES[label]).to(torch.bfloat16).save_pretrained(target)
    return target


class _Architecture(NamedTuple):
    """A GGUF architecture.

    parts       the names of a layer's tensors, by those of transformers without ".weight"
    interleaved  whether llama.cpp rotates neighbours rather than halves of a head
    plus_one    whether norms have 1 + w in the file
    """

    name: str
    parts: dict[str, str]
    interleaved: bool = False
    plus_one: bool = False


def write_gguf(model: Path, precision: Precision) -> Path:
    """Write the weights of a folder as GGUF, with a byte vocabulary: all prompts are token ids. -> the file

    Raises ImportError where the package gguf is not installed.
    """
    import gguf
    from transformers import AutoModelForCausalLM

    target = model / f"{precision}.gguf"
    if target.exists():
        return target
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    config, half = loaded.config, precision == "bfloat16"
    found = _ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(target.with_suffix(".part"), found.name)
    _add_shape(writer, config)
    _add_vocabulary(writer, config.vocab_size)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16 if half else gguf.LlamaFileType.ALL_F32)
    tied = {"lm_head.weight"} if config.tie_word_embeddings and found.name != "llama" else set()
    for name, weight in loaded.state_dict().items():
        for place, x in _tensors(name, weight, config, found) if name not in tied else ():
            kind, data = gguf.GGMLQuantizationType.F32, x.float().contiguous().numpy()
            if half and x.ndim >= 2 and "ffn_gate_inp" not in place:
                kind = gguf.GGMLQuantizationType.BF16
                data = gguf.quants.quantize(data, kind)
            writer.add_tensor(place, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    target.with_suffix(".part").rename(target)
    return target


def _add_shape(writer: Any, config: Any) -> None:
    rope = config.rope_parameters
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if config.model_type == "gemma3_text":
        writer.add_sliding_window(config.sliding_window)
    if config.model_type == "qwen3_moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _tensors(name: str, x: torch.Tensor, config: Any, found: _Architecture) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of the file for one of the model's, by name."""
    if name in _WHOLE:
        yield _WHOLE[name], x + 1 if found.plus_one and x.ndim == 1 else x
        return
    _, _, layer, rest = name.split(".", 3)
    place = f"blk.{layer}.%s.weight"
    if rest == "mlp.experts.gate_up_proj":
        for part, half in zip(("ffn_gate_exps", "ffn_up_exps"), x.chunk(2, 1), strict=True):
            yield place % part, half
        return
    if found.interleaved and rest.endswith(("q_proj.weight", "k_proj.weight")):
        heads = config.num_attention_heads if "q_proj" in rest else config.num_key_value_heads
        x = _interleaved(x, heads)
    yield place % found.parts[rest.removesuffix(".weight")], x + 1 if found.plus_one and x.ndim == 1 else x


def _add_vocabulary(writer: Any, vocab_size: int) -> None:
    """Add the byte tokenizer; llama.cpp wants a token for each row of the embedding, and one merge."""
    tokenizer: Any = byte_tokenizer()
    tokens = [str(tokenizer.convert_ids_to_tokens(i)) for i in range(len(tokenizer))]
    special, merged = set(tokenizer.all_special_tokens), "\u0120a"
    rest = [f"[unused {i}]" for i in range(len(tokens) + 1, vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*tokens, merged, *rest])
    writer.add_token_types([*(3 if token in special else 1 for token in tokens), 1, *(5 for _ in rest)])
    writer.add_token_merges(["\u0120 a"])
    writer.add_eos_token_id(int(tokenizer.eos_token_id))


QUANTISE = """
import ctypes, sys
import llama_cpp
source, target, kind = sys.argv[1:]
asked = llama_cpp.llama_model_quantize_default_params()
asked.ftype, asked.allow_requantize = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}"), True
sys.exit(llama_cpp.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(asked)))
"""


def quantise_gguf(source: Path, kind: str, folder: Path) -> Path:
    """Let llama.cpp write `source` in another type, such as Q4_K_M. -> the file in `folder`

    Raises RuntimeError if llama.cpp does not.
    """
    target = folder / f"{source.stem}-as-{kind}.gguf"
    if not target.exists():
        part = target.with_suffix(".part")
        done = python_process.run(("-c", QUANTISE, str(source), str(part), kind), capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"llama.cpp did not quantise {source.name}: {done.stderr[-500:]}")
        part.rename(target)
    return target


def write_openvino(model: Path, precision: Precision) -> Path:
    """Export a folder by optimum-intel; float16 weights for bfloat16 arithmetic. -> the folder

    optimum-intel needs an older transformers than GraftLM: OPTIMUM_PYTHON names a Python with that version.
    """
    target = model / f"openvino-{precision}"
    if not (target / "openvino_model.xml").exists():
        python = os.environ.get("OPTIMUM_PYTHON")
        kind = "fp16" if precision == "bfloat16" else "fp32"
        done = python_process.run(["-c", EXPORT, model, target, kind], python=python, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"optimum-intel did not export {model.name}: {done.stderr.strip().splitlines()[-1]}")
    return target


def _interleaved(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorder the rows of each head for llama.cpp's rotation, whose pairs are neighbours rather than halves."""
    rows, depth = weight.shape
    return weight.view(num_heads, 2, rows // num_heads // 2, depth).transpose(1, 2).reshape(rows, depth)


_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_QWEN3_MOE = {
    **_PARTS, "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate": "ffn_gate_inp",
    "mlp.experts.down_proj": "ffn_down_exps",
}  # fmt: skip
_GEMMA3 = {
    **_PARTS, "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
_ARCHITECTURES = {
    "llama": _Architecture("llama", _PARTS, interleaved=True),
    "qwen3_moe": _Architecture("qwen3moe", _QWEN3_MOE),
    "gemma3_text": _Architecture("gemma3", _GEMMA3, plus_one=True),
}
