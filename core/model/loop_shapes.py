"""The shapes of a model's CPU loops, read from its config.json without torch or transformers."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from graftlm.core.config import EngineConfig
from graftlm.core.errors import GraftError
from graftlm.core.model.gguf.folder import description_folder, find_gguf
from graftlm.kernels.cpu.compiled import loop_cache
from graftlm.kernels.cpu.compiled.loop_cache import LoopShapes
from graftlm.kernels.cpu.element_format import ElementFormat


def start_compiling(model: Any, config: EngineConfig) -> None:
    """Start to compile the loops of `model`, a name or folder with a local config.json, if it runs on a CPU.

    A wrong guess costs time only: loops that are missing later are compiled during the load.
    """
    if not isinstance(model, str | os.PathLike) or not _runs_on_cpu(config.device):
        return
    with suppress(OSError, ValueError, TypeError, KeyError, GraftError):  # the loader reports the error
        path = _config_file(os.fspath(model))
        if path is not None:
            loop_cache.start(shapes_of(json.loads(path.read_text(encoding="utf-8")), config), quiet=config.quiet)


def shapes_of(hf_config: dict[str, Any], config: EngineConfig) -> LoopShapes:
    """Read the shapes from a configuration. Raises KeyError if it lacks the dimensions of attention."""
    text = hf_config.get("text_config", hf_config)
    num_heads = int(text["num_attention_heads"])
    num_kv_heads = int(text.get("num_key_value_heads") or num_heads)
    head_dim = int(text.get("head_dim") or text["hidden_size"] // num_heads)
    dtype = config.dtype
    if dtype == "auto":
        dtype = str(hf_config.get("dtype") or hf_config.get("torch_dtype") or text.get("dtype"))
    half = dtype == "bfloat16" and not config.strict  # strict mode computes in float32 on a CPU
    element = ElementFormat.BFLOAT16 if half else ElementFormat.FLOAT32
    capped, int8 = bool(text.get("attn_logit_softcapping")), config.cache.dtype == "int8"
    return LoopShapes(num_heads // num_kv_heads, head_dim, element, capped, int8)


def _runs_on_cpu(device: str) -> bool:
    """Return True if a model will run on a CPU, by a guess without torch."""
    return device == "cpu" or (device == "auto" and not Path("/dev/nvidiactl").exists())


def _config_file(name: str) -> Path | None:
    """Return the path of a model's config.json, if it is on this machine."""
    if name == "sprout":
        from graftlm.core.model.embedded import sprout_folder

        return sprout_folder() / "config.json"
    gguf = find_gguf(name)
    if gguf is not None:
        return description_folder(gguf) / "config.json"
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder / "config.json"
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json")
    return Path(found) if isinstance(found, str) else None
