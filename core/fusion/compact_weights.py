"""Weights in 12 bits each beside their own 16, without loss, for steps of few tokens on a GPU.

A step of few tokens takes as long as reading the weights does; steps of many read the originals. So both are held.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

from torch import nn

from graftlm.core.config import EngineConfig
from graftlm.core.errors import ConfigError
from graftlm.core.fusion.expert_modules import expert_weights, has_experts
from graftlm.core.kv.memory import free_bytes, size_of
from graftlm.kernels.expert_dispatch import can_compact_experts
from graftlm.kernels.linear_dispatch import can_compact

if TYPE_CHECKING:
    from graftlm.core.loaded_model import LoadedModel

LARGEST_SHARE = 3 / 10
"""Of the memory that the weights leave free, which is KV's otherwise, if nobody says whether to have them."""

_SIZE = 0.77
"""Of what they are made of, lists included."""


class Compact(IntEnum):
    """Which weights are held in 12 bits too: none, those of linear layers, or those of a mixture's experts as well."""

    NONE = 0
    LINEARS = 1
    ALL = 2


def wants_compact(loaded: LoadedModel, config: EngineConfig) -> Compact:
    """Which weights a model is to have in 12 bits; raises ConfigError if they are asked for and cannot be had."""
    if config.compact_weights is False:
        return Compact.NONE
    linears = [m.weight for m in loaded.model.modules() if type(m) is nn.Linear and can_compact(m.weight)]
    found = [expert_weights(m) for m in loaded.model.modules() if has_experts(m) and not config.strict]
    experts = [w for e in found if not isinstance(e, str) and can_compact_experts(e) for w in (e.gate_up, e.down)]
    suited = linears + experts
    free = free_bytes(loaded.device) if suited else 0
    needed = [int(_SIZE * sum(weight.nbytes for weight in weights)) for weights in (linears, suited)]
    if config.compact_weights is None:
        fitting = [need <= LARGEST_SHARE * free for need in needed]
        return Compact.NONE if not suited or not fitting[0] else Compact.ALL if fitting[1] else Compact.LINEARS
    if not suited:
        raise ConfigError(
            f"compact_weights is True, but there are none for {loaded.name} in {str(loaded.dtype)[6:]} on "
            f"{loaded.device}; they need bfloat16, a Hopper GPU and Triton 3.6 or newer: leave compact_weights out"
        )
    if needed[1] > free:
        raise ConfigError(
            f"compact weights take {size_of(needed[1])} beside the weights, {size_of(free)} are free on "
            f"{loaded.device}; use compact_weights=False, or end what else uses the GPU"
        )
    return Compact.ALL
