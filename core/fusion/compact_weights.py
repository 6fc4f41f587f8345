"""Choose the weights that are held in 12 bits beside their original 16, without loss, for steps of few tokens on a GPU.

A step of few tokens takes as long as reading the weights does; steps of many tokens read the originals. Both forms are
held if they take a small share of the memory that is left for KV.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from graftlm.core.config import EngineConfig
from graftlm.core.errors import ConfigError
from graftlm.core.execution.routing import has_experts
from graftlm.core.fusion.expert_modules import expert_weights
from graftlm.core.kv.memory import free_bytes, size_of
from graftlm.kernels.bits12.weight import Bits12Weight
from graftlm.kernels.expert_dispatch import can_compact_experts
from graftlm.kernels.weight import PlainWeight, hold_as, weight_of

if TYPE_CHECKING:
    from graftlm.core.loaded_model import LoadedModel

LARGEST_SHARE = 3 / 10
"""The largest share of free GPU memory for 12-bit weights by default: the remainder is for KV."""


def choose_compact(loaded: LoadedModel, config: EngineConfig) -> None:
    """Mark the modules whose weights are also held in 12 bits: linear layers, and a mixture's experts if they fit.

    Raises ConfigError if the configuration requires 12-bit weights and the model or the card does not support them.
    """
    for module in loaded.model.modules():
        hold_as(module, None)
    if config.compact_weights is False:
        return
    linears, experts = _suited_linears(loaded.model), {} if config.strict else _suited_experts(loaded.model)
    needed = [sum(linears.values()), sum(linears.values()) + sum(experts.values())]
    free = free_bytes(loaded.device) if needed[1] else 0
    if config.compact_weights and not needed[1]:
        raise ConfigError(
            f"compact_weights is True, but there are none for {loaded.name} in {str(loaded.dtype)[6:]} on "
            f"{loaded.device}; they need bfloat16, a Hopper GPU and Triton 3.6 or newer: leave compact_weights out"
        )
    if config.compact_weights and needed[1] > free:
        raise ConfigError(
            f"compact weights take {size_of(needed[1])} beside the weights, {size_of(free)} are free on "
            f"{loaded.device}; use compact_weights=False, or end what else uses the GPU"
        )
    limit = free if config.compact_weights else LARGEST_SHARE * free
    for modules, total in zip((linears, experts), needed, strict=True):
        for module in modules if total <= limit else ():
            hold_as(module, Bits12Weight)


def _suited_linears(model: nn.Module) -> dict[nn.Module, int]:
    """Return the linear layers that can have codes, with the bytes of the codes."""
    weights = {module: weight_of(module) for module in model.modules()}
    return {m: _num_bytes(w) for m, w in weights.items() if type(w) is PlainWeight and Bits12Weight.suits(w.values)}


def _suited_experts(model: nn.Module) -> dict[nn.Module, int]:
    """Return the modules of experts that can have codes, with the bytes of the codes."""
    weights = {module: expert_weights(module) for module in model.modules() if has_experts(module)}
    return {
        module: sum(_num_bytes(PlainWeight(tensor.flatten(0, 1))) for tensor in (found.gate_up, found.down))
        for module, found in weights.items()
        if not isinstance(found, str) and can_compact_experts(found)
    }


def _num_bytes(weight: PlainWeight) -> int:
    """Return the additional bytes of a weight's codes."""
    return Bits12Weight(weight.values).num_bytes - weight.num_bytes
