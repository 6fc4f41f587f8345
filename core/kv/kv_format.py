"""KVFormat: the dtype of the KV cache and its number of bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from graftlm.core.config import EngineConfig
from graftlm.core.errors import ConfigError
from graftlm.kernels.bits12 import kv_codec
from graftlm.kernels.gpu.support import SLOW_MEMORY, memory_rate, triton_problem, triton_version
from graftlm.kernels.hopper.support import gluon_kernel
from graftlm.kernels.kv_store import FP8, KVStore, allocate_kv, token_bytes

if TYPE_CHECKING:
    from graftlm.core.loaded_model import LoadedModel

OLDEST_FOR_COMPACT = (9, 0)
"""Compute capability, Hopper's: the oldest on which KV in 12 bits was tried."""

FASTER_COMPACT = (9, 0)
"""The compute capability, Hopper's, on which KV in 12 bits was measured to be faster."""

NARROW = 64
"""Heads of so many dimensions are faster in 12 bits with an H100's memory only: on an H200 a step of 128 rows of 1,000
tokens takes 7 % longer."""


@dataclass(frozen=True)
class KVFormat:
    """How the KV store of a model is kept.

    dtype    of what it holds; where it is compact, of what that was made of
    compact  in 12 bits a number (kernels/bits12/kv_codec.py)
    """

    dtype: torch.dtype
    compact: bool = False

    def __str__(self) -> str:
        return f"{str(self.dtype)[6:]} in 12 bits" if self.compact else str(self.dtype)[6:]

    def bytes_per_token(self, loaded: LoadedModel) -> int:
        """Bytes that one token takes in the KV pool; an estimate in the serial lane."""
        if not loaded.layers:
            return loaded.bytes_per_token
        return sum(token_bytes(layer, self.dtype, self.compact) for layer in loaded.kv_layout)

    def store(self, loaded: LoadedModel, num_slots: int, scales: Sequence[torch.Tensor] = ()) -> KVStore:
        """Allocate a store of `num_slots` slots. scales: of Float8KV, for float8"""
        return allocate_kv(loaded.kv_layout, num_slots, self.dtype, loaded.device, scales=scales, compact=self.compact)


def kv_format(loaded: LoadedModel, config: EngineConfig) -> KVFormat:
    """How `loaded` is to keep KV. ConfigError if the configuration asks for what it cannot have."""
    wanted = config.cache.dtype
    if wanted in ("fp8", "int8", "compact") and any(layer.latent for layer in loaded.layers):
        raise ConfigError(
            f"CacheConfig.dtype is {wanted!r}, but {loaded.name} caches latents, which are kept in its own dtype: "
            "leave it out"
        )
    if wanted == "fp8":
        if loaded.lane != "paged" or loaded.device.type != "cuda":
            raise ConfigError(
                f"CacheConfig.dtype is 'fp8', but {_place(loaded)}; KV in float8 is for models in the paged lane on a "
                "GPU: leave it out"
            )
        return KVFormat(FP8)
    if wanted == "int8":
        reason = _why_not_int8(loaded, config)
        if reason is not None:
            raise ConfigError(
                f"CacheConfig.dtype is 'int8', but {reason}; KV in int8 is for models in the paged lane on a CPU, in "
                "float32 or bfloat16, with attention='auto' or 'torch' and without strict=True: leave it out"
            )
        return KVFormat(torch.int8)
    if wanted == "model":
        return KVFormat(loaded.dtype)
    reason = _place(loaded) if loaded.lane != "paged" else _why_not_compact(loaded, config)
    if reason is not None and wanted == "compact":
        raise ConfigError(
            f"CacheConfig.dtype is 'compact', but {reason}; KV in 12 bits is for models in the paged lane with heads "
            f"of {kv_codec.SIZES} dimensions in bfloat16, on a Hopper GPU or a newer one, with Triton 3.6 or newer and "
            "its attention: leave it out"
        )
    compact = reason is None and loaded.kv_reason is None and _is_taken(loaded, wanted)
    return KVFormat(loaded.dtype, compact)


def may_be_compact(loaded: LoadedModel, config: EngineConfig) -> bool:
    """Whether a model may keep KV in 12 bits, provided that it runs in the paged lane and qualifies with it."""
    return _why_not_compact(loaded, config) is None and _is_taken(loaded, config.cache.dtype)


def _is_taken(loaded: LoadedModel, wanted: str) -> bool:
    """Whether the configuration takes 12 bits where they are possible: asked for, or faster on this card."""
    if wanted == "auto" and torch.cuda.get_device_capability(loaded.device) == FASTER_COMPACT:
        wide = all(layer.k_dim > NARROW for layer in loaded.layers)
        return wide or 0 < memory_rate(loaded.device) < SLOW_MEMORY
    return wanted == "compact"


def _place(loaded: LoadedModel) -> str:
    return f"{loaded.name} runs " + ("in the serial lane" if loaded.lane != "paged" else f"on {loaded.device}")


def _why_not_int8(loaded: LoadedModel, config: EngineConfig) -> str | None:
    """Why a model cannot keep KV in int8; None if it can."""
    if loaded.lane != "paged" or loaded.device.type != "cpu":
        return _place(loaded)
    if config.strict:
        return "strict=True"
    if config.attention not in ("auto", "torch"):
        return f"attention={config.attention!r}"
    if loaded.dtype not in (torch.float32, torch.bfloat16):
        return f"{loaded.name} computes in {str(loaded.dtype)[6:]}"
    return None


def _why_not_compact(loaded: LoadedModel, config: EngineConfig) -> str | None:
    """Why a model cannot keep KV in 12 bits; None if it can."""
    if loaded.device.type != "cuda":
        return f"{loaded.name} runs on {loaded.device}"
    if loaded.dtype is not torch.bfloat16:
        return f"{loaded.name} computes in {str(loaded.dtype)[6:]}"
    if config.strict:
        return "strict=True"
    if config.attention not in ("auto", "triton"):
        return f"attention={config.attention!r}"
    if not loaded.layers:
        return f"{loaded.name} keeps its own cache"
    for layer in loaded.layers:
        if layer.k_dim != layer.v_dim or layer.k_dim not in kv_codec.DIMS:
            dims = str(layer.k_dim) if layer.k_dim == layer.v_dim else f"{layer.k_dim} and {layer.v_dim}"
            return f"{loaded.name} has heads of {dims} dimensions"
    return _card_problem(loaded)


def _card_problem(loaded: LoadedModel) -> str | None:
    """Why the kernels do not run here, or not on a model's heads; None if they do."""
    problem = triton_problem(loaded.device)
    if problem is not None:
        return problem
    if torch.version.hip is not None or torch.cuda.get_device_capability(loaded.device) < OLDEST_FOR_COMPACT:
        return f"the card is {torch.cuda.get_device_name(loaded.device)}"
    kernel = gluon_kernel("bits12.decode")
    if kernel is None:
        return f"Triton {'.'.join(map(str, triton_version()))} is installed"
    group = max(-(-layer.num_heads // layer.num_kv_heads) for layer in loaded.layers)
    if group > kernel.MAX_GROUP:
        return f"{group} query heads share a KV head, and at most {kernel.MAX_GROUP} can"
    return None
