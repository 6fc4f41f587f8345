"""Refuse checkpoints whose quantised weights would be read without their scales, before any weight is read.

transformers ignores a quantization method that it does not know, with a warning, and tensors that a model does not
have. The codes of a quantised weight are then read as its values.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from graftlm.core.errors import ModelError
from graftlm.core.model.transformers_lock import importing_transformers

METHODS = frozenset({"compressed-tensors", "fp8", "awq", "gptq", "bitsandbytes", "torchao", "mxfp4", "modelopt"})
"""The quantization methods that checkpoint.py reads."""

_SUFFIXES: dict[str, frozenset[str]] = {
    ".weight_scale": frozenset({"compressed-tensors", "modelopt", "fbgemm_fp8", "quark", "bitnet"}),
    ".weight_scale_inv": frozenset({"fp8"}),
    ".weight_scale_2": frozenset({"modelopt"}),
    ".input_scale": frozenset({"compressed-tensors", "modelopt", "fp8", "fbgemm_fp8", "quark"}),
    ".weight_packed": frozenset({"compressed-tensors"}),
    ".weight_global_scale": frozenset({"compressed-tensors"}),
    ".weight_zero_point": frozenset({"compressed-tensors", "quark"}),
    ".weight_g_idx": frozenset({"compressed-tensors"}),
    ".qweight": frozenset({"gptq", "awq", "auto-round", "sinq"}),
    ".qzeros": frozenset({"gptq", "awq", "auto-round"}),
    "_blocks": frozenset({"mxfp4"}),
    ".weight.absmax": frozenset({"bitsandbytes"}),
    ".weight.quant_map": frozenset({"bitsandbytes"}),
    ".SCB": frozenset({"bitsandbytes"}),
    ".weight:_weight_qdata": frozenset({"torchao"}),
}
"""Ends of the names of tensors that only quantised weights have, with the methods that write them."""

_PART = re.compile(r"scale|zero|packed|qweight|absmax|codebook|quant")
"""A part of the name of a tensor that belongs to a quantised weight, if no module of the model has it."""

_UNUSED = (".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".input_scale", ".output_scale")
"""Ends of the names of scales of activations and KV, which no weight needs: this runtime computes its own."""

REMEDY = "use another file of the model: its original in bfloat16, or one of a format that docs/quantised.md lists"


def check_format(source: str, hf_config: Any) -> str | None:
    """Return the quantization method of a folder or Hugging Face id; None if its weights are plain.

    hf_config  the configuration of the model; its `quantization_config` is a dictionary, an object or missing
    Raises ModelError for an unknown method, and for tensors that another method has written.
    """
    folder = local_folder(source)
    quantization = quantization_of(hf_config, folder)
    method = str(quantization["quant_method"]) if quantization is not None else None
    if method is not None and method not in _methods():
        raise ModelError(f"the weights of {source!r} are quantised as {method!r}, which cannot be read; {REMEDY}")
    names = tensor_headers(folder) if folder is not None else {}
    _check_names(source, names, method)
    return method


def check_unexpected(source: str, names: Iterable[str], method: str | None) -> None:
    """Raise ModelError if tensors that the model does not have look like a part of a quantised weight."""
    left = [name for name in sorted(names) if not name.endswith(_UNUSED)]
    _check_names(source, left, method)
    parts = [name for name in left if _PART.search(name.rpartition(".")[2])]
    if parts:
        raise ModelError(
            f"{len(parts)} tensors of {source!r}, {parts[0]!r} first, look like parts of quantised weights, and the "
            f"model has no place for them; {REMEDY}"
        )


def _check_names(source: str, names: Iterable[str], method: str | None) -> None:
    """Raise ModelError if a tensor belongs to another quantised format than `method`; None for plain weights."""
    found: dict[str, list[str]] = {}
    for name in names:
        suffix = next((end for end in _SUFFIXES if name.endswith(end)), None)
        if suffix is not None and method not in _SUFFIXES[suffix]:
            found.setdefault(suffix, []).append(name)
    if not found:
        return
    suffix, tensors = next(iter(found.items()))
    written_by = " or ".join(sorted(_SUFFIXES[suffix]))
    said = f"says that they are quantised as {method!r}" if method is not None else "has no quantization_config"
    raise ModelError(
        f"the weights of {source!r} are quantised: {len(tensors)} tensors are called *{suffix}, {tensors[0]!r} first, "
        f"as {written_by} writes them, but config.json {said}. Without it they would be read as plain numbers; restore "
        f"config.json from where the model came from, or {REMEDY}"
    )


def quantization_of(hf_config: Any, folder: Path | None) -> Mapping[str, Any] | None:
    """Return the quantization_config of a checkpoint with its `quant_method`; None for plain weights.

    ModelOpt wrote a file of its own, hf_quant_config.json, before it wrote into config.json.
    """
    found = getattr(hf_config, "quantization_config", None)
    if found is None and folder is not None:
        with suppress(OSError, ValueError, KeyError):
            own = json.loads((folder / "hf_quant_config.json").read_text(encoding="utf-8"))
            found = {"quant_method": "modelopt", **own["quantization"]}
    if found is None:
        return None
    if not isinstance(found, Mapping) and not hasattr(found, "to_dict"):
        raise ModelError(
            f"config.json has the quantization_config {found!r}, expected an object with a 'quant_method'; restore "
            f"config.json from where the model came from, or {REMEDY}"
        )
    described: dict[str, Any] = dict(found) if isinstance(found, Mapping) else found.to_dict()
    method = described.get("quant_method")
    if method is None:
        method = "modelopt" if "quant_algo" in described else "bitsandbytes" if _loads_in_bits(described) else "unknown"
    described["quant_method"] = getattr(method, "value", method)
    return described


def _loads_in_bits(described: Mapping[str, Any]) -> bool:
    return bool(described.get("load_in_4bit") or described.get("load_in_8bit"))


def _methods() -> set[str]:
    """Return the methods that can be read, here or by transformers, which asks for their packages."""
    with importing_transformers():
        from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    return {*AUTO_QUANTIZATION_CONFIG_MAPPING, *METHODS}


def local_folder(source: str) -> Path | None:
    """Return the local folder of a model's files; None if they are not on this machine."""
    if os.path.isdir(source):
        return Path(source)
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(source, "config.json")
    return Path(cached).parent if isinstance(cached, str) else None


def tensor_headers(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the names of the tensors in the safetensors files of a folder, each with its dtype and shape."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= tensor_header(path) or {}
    return found


def tensor_header(path: Path) -> dict[str, dict[str, Any]] | None:
    """Return the names of the tensors in a safetensors file, each with its dtype and shape; None if it is damaged."""
    damaged = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error)
    with suppress(*damaged), path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(min(length, path.stat().st_size)))
        return {name: dict(entry) for name, entry in header.items() if name != "__metadata__"}
    return None
