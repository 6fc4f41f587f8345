"""Weights in 12 bits each beside their own 16, without loss, for steps of few tokens on a GPU.

A step of few tokens takes as long as reading the weights does; steps of many read the originals. So both are held.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from graftlm.core.config import EngineConfig
from graftlm.core.errors import ConfigError
from graftlm.core.kv.memory import free_bytes, size_of
from graftlm.kernels.linear_dispatch import can_compact

if TYPE_CHECKING:
    from graftlm.core.loaded_model import LoadedModel

LARGEST_SHARE = 1 / 5
"""Of the memory that the weights leave free, which is KV's otherwise, if nobody says whether to have them."""

_SIZE = 0.76
"""Of what they are made of, lists included."""


def wants_compact(loaded: LoadedModel, config: EngineConfig) -> bool:
    """Whether a model is to have compact weights; raises ConfigError if they are asked for and cannot be had."""
    if config.compact_weights is False:
        return False
    suited = [m.weight for m in loaded.model.modules() if type(m) is nn.Linear and can_compact(m.weight)]
    needed, free = int(_SIZE * sum(weight.nbytes for weight in suited)), free_bytes(loaded.device) if suited else 0
    if config.compact_weights is None:
        return bool(suited) and not config.strict and needed <= LARGEST_SHARE * free
    if not suited or config.strict:
        why = "strict=True" if config.strict else f"{loaded.name} in {str(loaded.dtype)[6:]} on {loaded.device}"
        raise ConfigError(
            f"compact_weights is True, but there are none for {why}; they need bfloat16, a Hopper GPU, Triton 3.6 or "
            "newer and strict=False: leave compact_weights out"
        )
    if needed > free:
        raise ConfigError(
            f"compact weights take {size_of(needed)} beside the weights, {size_of(free)} are free on {loaded.device}; "
            "use compact_weights=False, or end what else uses the GPU"
        )
    return True
