"""Names of weight quantizations and the transformers configuration of each."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from graftlm.core.errors import ConfigError, ModelError


def _bitsandbytes(bits: int) -> Any:
    import torch

    options = {"load_in_8bit": True} if bits == 8 else {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    return _transformers("BitsAndBytesConfig")(**options, bnb_4bit_compute_dtype=torch.bfloat16)


def _torchao(name: str) -> Any:
    quantization = import_module("torchao.quantization")
    return _transformers("TorchAoConfig")(quant_type=getattr(quantization, name)())


def _transformers(name: str) -> Any:
    return getattr(import_module("transformers"), name)


_CONFIGS: dict[str, Callable[[], Any]] = {
    "bnb-8bit": lambda: _bitsandbytes(8),
    "bnb-4bit": lambda: _bitsandbytes(4),
    "torchao-int8": lambda: _torchao("Int8WeightOnlyConfig"),
    "torchao-int4": lambda: _torchao("Int4WeightOnlyConfig"),
    "torchao-fp8": lambda: _torchao("Float8WeightOnlyConfig"),
    "hqq-8bit": lambda: _transformers("HqqConfig")(nbits=8, group_size=64),
    "hqq-4bit": lambda: _transformers("HqqConfig")(nbits=4, group_size=64),
    "quanto-int8": lambda: _transformers("QuantoConfig")(weights="int8"),
    "quanto-int4": lambda: _transformers("QuantoConfig")(weights="int4"),
    "fp8": lambda: _transformers("FineGrainedFP8Config")(),
}


def quantization_config(name: str) -> Any:
    """Return the transformers quantization configuration of `name`.

    Quantized checkpoints need none: their files have a configuration.
    Raises ConfigError for an unknown name, ModelError if the quantizer's package is missing.
    """
    if name not in _CONFIGS:
        raise ConfigError(f"quantization is {name!r}; use one of {', '.join(sorted(_CONFIGS))}")
    try:
        return _CONFIGS[name]()
    except ImportError as error:
        raise ModelError(f"quantization {name!r} needs a package that is not installed: {error}") from error
