"""Names of weight quantizations and the transformers configuration behind each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graftlm.core.errors import ConfigError, ModelError


def _bitsandbytes(bits: int) -> Any:
    import torch
    from transformers import BitsAndBytesConfig

    if bits == 8:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)


def _torchao(name: str) -> Any:
    from torchao import quantization
    from transformers import TorchAoConfig

    return TorchAoConfig(quant_type=getattr(quantization, name)())


def _hqq(bits: int) -> Any:
    from transformers import HqqConfig

    return HqqConfig(nbits=bits, group_size=64)


def _quanto(weights: str) -> Any:
    from transformers import QuantoConfig

    return QuantoConfig(weights=weights)


def _fp8() -> Any:
    from transformers import FineGrainedFP8Config

    return FineGrainedFP8Config()


_CONFIGS: dict[str, Callable[[], Any]] = {
    "bnb-8bit": lambda: _bitsandbytes(8),
    "bnb-4bit": lambda: _bitsandbytes(4),
    "torchao-int8": lambda: _torchao("Int8WeightOnlyConfig"),
    "torchao-int4": lambda: _torchao("Int4WeightOnlyConfig"),
    "torchao-fp8": lambda: _torchao("Float8WeightOnlyConfig"),
    "hqq-8bit": lambda: _hqq(8),
    "hqq-4bit": lambda: _hqq(4),
    "quanto-int8": lambda: _quanto("int8"),
    "quanto-int4": lambda: _quanto("int4"),
    "fp8": _fp8,
}


def quantization_config(name: str) -> Any:
    """The transformers quantization configuration of `name`.

    Checkpoints that are quantized already need none: their own configuration is read with them.
    Raises ConfigError for an unknown name, ModelError if the package that does it is missing.
    """
    if name not in _CONFIGS:
        raise ConfigError(f"quantization is {name!r}; use one of {', '.join(sorted(_CONFIGS))}")
    try:
        return _CONFIGS[name]()
    except ImportError as error:
        raise ModelError(f"quantization {name!r} needs a package that is not installed: {error}") from error
