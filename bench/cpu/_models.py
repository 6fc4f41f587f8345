"""One set of weights for all engines: a folder of transformers, a GGUF file, and OpenVINO's form."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

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


def write_gguf(model: Path, precision: Precision) -> Path:
    """Write the weights of a Llama folder as GGUF, with a byte vocabulary: all prompts are token ids. -> the file

    Raises ImportError where the package gguf is not installed.
    """
    import gguf
    from safetensors.torch import load_file
    from transformers import AutoConfig

    target = model / f"{precision}.gguf"
    if target.exists():
        return target
    config = AutoConfig.from_pretrained(model)
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(model.glob("*.safetensors")):
        weights |= load_file(file)
    half = precision == "bfloat16"
    writer = gguf.GGUFWriter(target.with_suffix(".part"), "llama")
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
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    _add_vocabulary(writer, config.vocab_size)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16 if half else gguf.LlamaFileType.ALL_F32)
    for name, weight in weights.items():
        kind = gguf.GGMLQuantizationType.F32
        x = weight.float()
        if name.endswith("q_proj.weight"):
            x = _interleaved(x, config.num_attention_heads)
        elif name.endswith("k_proj.weight"):
            x = _interleaved(x, config.num_key_value_heads)
        data: Any = x.contiguous().numpy()
        if half and x.ndim == 2:
            kind = gguf.GGMLQuantizationType.BF16
            data = gguf.quants.quantize(data, kind)
        writer.add_tensor(_gguf_name(name), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    target.with_suffix(".part").rename(target)
    return target


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


def _gguf_name(name: str) -> str:
    if name in _WHOLE:
        return _WHOLE[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_PARTS[rest.removesuffix('.weight')]}.weight"
