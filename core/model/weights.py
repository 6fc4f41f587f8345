"""The weights of a Hugging Face decoder: device, dtype, quantization, reading, and files to unmap."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from graftlm.core.config import EngineConfig
from graftlm.core.errors import ConfigError, GraftError, ModelError
from graftlm.core.hub import only_local, why_not
from graftlm.core.kv.memory import check_weights_fit, free_bytes, may_be_too_large
from graftlm.core.model.description import dtype_of, model_config
from graftlm.core.model.gguf.families import dtype_name
from graftlm.core.model.gguf.folder import listed_gguf
from graftlm.core.model.gguf.reader import GgufFile
from graftlm.core.model.quantised.format_check import (
    METHODS,
    REMEDY,
    check_format,
    check_unexpected,
    quantization_of,
    tensor_header,
)
from graftlm.core.model.quantised.rounded_model import round_model, scheme_of
from graftlm.core.model.quantised.rounding import SCHEMES
from graftlm.core.model.transformers_lock import building_model, importing_transformers
from graftlm.kernels.codes.tiled_weight import runs_on
from graftlm.kernels.cpu.mapped_files import MappedFiles, read_once

if TYPE_CHECKING:
    from torch import nn

    from graftlm.core.fusion.linears import Fusions
    from graftlm.core.tensor_parallel.shard_plan import ShardPart

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""safetensors' names of dtypes."""


def choose_device(name: str) -> torch.device:
    """Return the device that an option names; "auto" is a GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device is {name!r}; use 'auto', 'cpu', 'cuda' or 'cuda:N'") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"device is {name!r}; GraftLM runs on CPUs and on NVIDIA GPUs: use 'auto', 'cpu', 'cuda' or 'cuda:N'"
        )
    if device.type == "cuda":
        _check_gpu(name, device)
    return device


def _check_gpu(name: str, device: torch.device) -> None:
    if not torch.cuda.is_available():
        why = "" if torch.version.cuda else ", and this torch was built without CUDA"
        raise ConfigError(f"device is {name!r}, but torch sees no GPU here{why}; use device='cpu'")
    count = torch.cuda.device_count()
    if device.index is not None and device.index >= count:
        raise ConfigError(f"device is {name!r}, torch sees {count} GPU(s) here; use 'cuda:0' to 'cuda:{count - 1}'")


def choose_dtype(config: EngineConfig, device: torch.device) -> torch.dtype | Literal["auto"]:
    """Return the dtype of the loaded weights; "auto" is the checkpoint's own.

    Strict mode on a CPU computes in float32 whatever the checkpoint's dtype: results of a matmul in bfloat16 depend
    on the batch. The cost is twice the memory and the bandwidth.
    """
    if config.strict and device.type == "cpu":
        return torch.float32
    if config.dtype == "auto":
        return "auto"
    dtype: torch.dtype = getattr(torch, config.dtype)
    return dtype


def _bitsandbytes(bits: int) -> Any:
    options = {"load_in_8bit": True} if bits == 8 else {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    return _transformers("BitsAndBytesConfig")(**options, bnb_4bit_compute_dtype=torch.bfloat16)


def _torchao(name: str) -> Any:
    quantization = import_module("torchao.quantization")
    return _transformers("TorchAoConfig")(quant_type=getattr(quantization, name)())


def _transformers(name: str) -> Any:
    with importing_transformers():
        return getattr(import_module("transformers"), name)


_QUANTIZATIONS: dict[str, Callable[[], Any]] = {
    "bnb-8bit": lambda: _bitsandbytes(8),
    "bnb-4bit": lambda: _bitsandbytes(4),
    "torchao-int8": lambda: _torchao("Int8WeightOnlyConfig"),
    "torchao-int4": lambda: _torchao("Int4WeightOnlyConfig"),
    "torchao-fp8": lambda: _torchao("Float8WeightOnlyConfig"),
    "hqq-8bit": lambda: _transformers("HqqConfig")(nbits=8, group_size=64),
    "hqq-4bit": lambda: _transformers("HqqConfig")(nbits=4, group_size=64),
    "quanto-int8": lambda: _transformers("QuantoConfig")(weights="int8"),
    "quanto-int4": lambda: _transformers("QuantoConfig")(weights="int4"),
    "finegrained-fp8": lambda: _transformers("FineGrainedFP8Config")(),
}
"""Option `quantization` -> the constructor of transformers' configuration."""


_ROOM = 1.3
"""Bytes on a GPU for each of a quantised file: scales are wider there, and embeddings have values."""


def _quantization_config(name: str) -> Any:
    """Return the transformers quantization configuration of `name`.

    Quantized checkpoints need none: their files have a configuration.
    Raises ConfigError for an unknown name, ModelError if the quantizer's package is missing.
    """
    if name not in _QUANTIZATIONS:
        raise ConfigError(f"quantization is {name!r}; use one of {', '.join((*SCHEMES, *sorted(_QUANTIZATIONS)))}")
    try:
        return _QUANTIZATIONS[name]()
    except ImportError as error:
        raise ModelError(f"quantization {name!r} needs a package that is not installed: {error}") from error


def read_weights(source: str, config: EngineConfig, device: torch.device) -> nn.Module:
    """Read the weights of a folder or Hugging Face id. Raises ModelError if they cannot be read or are incomplete."""
    gguf = listed_gguf(source)
    if gguf is not None:
        return read_gguf_model(gguf, source, config, device)
    method = check_format(source, model_config(source, config)) if not config.trust_remote_code else None
    if method is not None and config.quantization is not None:
        raise quantised_already(source, config)
    if method in METHODS and (quantised := read_quantised(source, config, device)) is not None:
        return quantised
    options: dict[str, Any] = {"dtype": choose_dtype(config, device), "local_files_only": only_local(source)}
    scheme = config.quantization if config.quantization in SCHEMES else None
    if config.quantization is not None and scheme is None:
        options["quantization_config"] = _quantization_config(config.quantization)
    if scheme is not None and options["dtype"] == "auto":
        options["dtype"] = torch.bfloat16
    may_not_fit = device.type == "cuda" or may_be_too_large(source, device)
    if config.quantization is None and may_not_fit and (described := _described(source, config, device)) is not None:
        check_weights_fit(source, described, device)
    kept_plain = device.type == "cpu" and config.quantization is None and not config.trust_remote_code
    try:
        with (
            progress_bars(shown=not config.quiet and sys.stderr.isatty()),
            read_once(converted_files(source, options["dtype"]) if kept_plain else ()),
        ):
            hf_config = model_config(source, config)
            model_class = _class_of(hf_config)
            with building_model():
                read: Any = model_class.from_pretrained(
                    source, trust_remote_code=config.trust_remote_code, output_loading_info=True, **options
                )
    except Exception as error:
        if method is not None:
            raise ModelError(
                f"the weights of {source!r} are quantised as {method!r}, which transformers could not read here: "
                f"{why_not(source, error)}; install the package that it names, if it names one, or {REMEDY}"
            ) from error
        where = "folder" if os.path.isdir(source) else "Hugging Face id"
        raise ModelError(f"no model could be loaded from the {where} {source!r}: {why_not(source, error)}") from error
    loaded: nn.Module
    loaded, report = read
    if not config.trust_remote_code:
        check_unexpected(source, report["unexpected_keys"], method)
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(
            f"{source!r} lacks {len(missing)} weights, {missing[0]!r} first; its files are incomplete or of another "
            "architecture than its config.json says"
        )
    if device.type == "cpu" and config.dtype == "auto" and dtype_of(loaded) is torch.float16:
        loaded = loaded.float()  # half precision has no fast matmul on CPUs
    if scheme is not None:
        round_model(loaded, scheme_of(scheme), device, source)
    return loaded


def _class_of(hf_config: Any) -> Any:
    """Return the auto class of a configuration: a model that reads pictures is loaded with its encoder."""
    from graftlm.core.media.processor import reads_pictures

    return _transformers("AutoModelForImageTextToText" if reads_pictures(hf_config) else "AutoModelForCausalLM")


def quantised_already(name: str, config: EngineConfig) -> ConfigError:
    """Return the error of the option `quantization` for a model that is quantised."""
    return ConfigError(
        f"quantization is {config.quantization!r}, but {name!r} is quantised already; leave quantization out"
    )


def read_quantised(
    source: str, config: EngineConfig, device: torch.device, part: ShardPart | None = None
) -> nn.Module | None:
    """Read a quantised checkpoint with its weights in the dtype of the model; None if these do not fit on a GPU.

    The packages of the formats may keep them packed there.

    part  that is read of a model over several processes, which fits by itself
    """
    from graftlm.core.model.quantised.checkpoint import read_checkpoint

    hf_config = model_config(source, config)
    described = _described(source, config, device) if part is None else None
    try:
        if described is not None and not _fit_as_codes(Path(source).glob("*.safetensors"), config, device):
            check_weights_fit(source, described, device)
    except ModelError:
        if device.type == "cuda":
            return None
        raise
    chosen = choose_dtype(config, device)
    own = getattr(hf_config, "dtype", None)
    dtype = chosen if isinstance(chosen, torch.dtype) else torch.float32 if own is torch.float32 else torch.bfloat16
    folder = snapshot(source)
    quantization = quantization_of(hf_config, folder)
    assert quantization is not None
    try:
        with progress_bars(shown=False):
            widened = _widened(config, device)
            return read_checkpoint(source, folder, hf_config, quantization, dtype, device, part, widened)
    except GraftError:
        raise
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise ModelError(f"no model could be loaded from {source!r}: {why_not(source, error)}") from error


def _widened(config: EngineConfig, device: torch.device) -> bool:
    """Return True if the weights of quantised files get values when they are read."""
    return device.type == "cuda" and config.compact_weights is False


def _fit_as_codes(paths: Iterable[Path], config: EngineConfig, device: torch.device) -> bool:
    """Return True if quantised files fit on a GPU whose kernels multiply codes, however large their values would be."""
    if config.dtype not in ("auto", "bfloat16") or _widened(config, device) or not runs_on(device):
        return False
    num_bytes = sum(path.stat().st_size for path in paths)
    return 0 < _ROOM * num_bytes < free_bytes(device)


def snapshot(source: str) -> Path:
    """Return the folder of a model's files, downloaded if they are not on this machine."""
    if os.path.isdir(source):
        return Path(source)
    from huggingface_hub import snapshot_download

    patterns = ["*.safetensors", "*.json"]
    return Path(snapshot_download(source, allow_patterns=patterns, local_files_only=only_local(source)))


def read_gguf_model(
    file: GgufFile, source: str, config: EngineConfig, device: torch.device, part: ShardPart | None = None
) -> nn.Module:
    """Read the model of a GGUF file. part: that is read of a model over several processes, which fits by itself"""
    from graftlm.core.model.gguf.weights import read_model

    name = str(file.paths[0])
    if config.quantization is not None:
        raise quantised_already(name, config)
    described = _described(source, config, device) if part is None and may_be_too_large(source, device) else None
    if described is not None and not _fit_as_codes(file.paths, config, device):
        check_weights_fit(name, described, device)
    chosen, hf_config = choose_dtype(config, device), model_config(source, config)
    dtype: torch.dtype = getattr(torch, dtype_name(file)) if chosen == "auto" else chosen
    if (device.type, chosen, dtype) == ("cpu", "auto", torch.float16):
        dtype = torch.float32  # half precision has no fast matmul on CPUs
    try:
        with progress_bars(shown=False):
            return read_model(file, hf_config, dtype, device, widened=_widened(config, device), part=part)
    except GraftError:
        raise
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise ModelError(
            f"the weights of {name!r} cannot be read: {type(error).__name__}: {str(error)[:500]}"
        ) from error


def _described(source: str, config: EngineConfig, device: torch.device) -> nn.Module | None:
    """Return the model that a configuration describes, without weights; None if only reading the weights shows it."""
    try:
        hf_config = model_config(source, config)
        chosen = choose_dtype(config, device)
        dtype = getattr(hf_config, "dtype", None) if chosen == "auto" else chosen
        dtype = torch.float32 if (device.type, chosen, dtype) == ("cpu", "auto", torch.float16) else dtype
        if dtype is None:
            return None
        model_class = _class_of(hf_config)
        with building_model(), torch.device("meta"):
            described: nn.Module = model_class.from_config(
                hf_config, dtype=dtype, trust_remote_code=config.trust_remote_code
            )
    except Exception:  # reading the weights reports the error
        return None
    return described


@contextmanager
def progress_bars(*, shown: bool) -> Iterator[None]:
    """Switch off transformers' progress bars unless `shown`, and restore the setting afterwards."""
    with importing_transformers():
        from transformers.utils import logging

    hidden = not shown and logging.is_progress_bar_enabled()
    if hidden:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if hidden:
            logging.enable_progress_bar()


def converted_files(source: str, dtype: torch.dtype | str) -> list[Path]:
    """Return the files in a folder whose tensors are all converted to `dtype` when they are read; none for "auto".

    Their mapped pages are read once.
    """
    wanted = _NAMES.get(dtype) if isinstance(dtype, torch.dtype) else None
    if wanted is None or not os.path.isdir(source):
        return []
    return [path for path in sorted(Path(source).glob("*.safetensors")) if wanted not in _dtypes_in(path)]


def _dtypes_in(path: Path) -> set[str]:
    """Return safetensors' names of the dtypes in a file; all of them if it cannot be read."""
    header = tensor_header(path)
    return {str(entry.get("dtype")) for entry in header.values()} if header is not None else set(_NAMES.values())


def leave_files(model: nn.Module, fusions: Fusions) -> None:
    """Copy the weights that are still mapped from files, if most other weights have been repacked into memory.

    One mapped weight keeps the whole mapping, whose pages that were read count as this process's memory.
    """
    if fusions.num_packed:
        files = MappedFiles()
        for parameter in model.parameters():
            if parameter.data in files:
                parameter.data = parameter.data.clone()
