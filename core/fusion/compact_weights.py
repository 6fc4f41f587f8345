"""Weights in 12 bits each beside their own 16, without loss, for steps of few tokens on a GPU.

A step of few tokens takes as long as reading the weights does; steps of many read the originals. So both are held.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from graftlm.core.config import EngineConfig
from graftlm.core.errors import ConfigError
from graftlm.core.fusion.layer_parts import AllClose, Parts, Product
from graftlm.core.kv.memory import free_bytes, size_of
from graftlm.kernels.bits12.compact_product import (
    ONE_OF_EACH,
    can_compact,
    compact_gate,
    compact_parts,
    compact_product,
    compacted,
)
from graftlm.kernels.bits12.weight_codec import CompactWeight
from graftlm.kernels.gpu.elementwise import silu_mul

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


@dataclass(frozen=True)
class CompactWeights:
    """The weights of a layer in 12 bits; None for a product that reads all 16."""

    qkv: CompactWeight | None = None
    out: CompactWeight | None = None
    gate_up: CompactWeight | None = None
    down: CompactWeight | None = None

    @property
    def held(self) -> tuple[bool, ...]:
        """Which of them there are."""
        return tuple(weight is not None for weight in (self.qkv, self.out, self.gate_up, self.down))


def compact_layer(parts: Parts, agree: AllClose) -> CompactWeights:
    """The weights of a layer's products in compact form, where they have one that `agree`s with the product."""

    def summed(product: Product | None) -> CompactWeight | None:
        if product is None or product.bias is not None:
            return None
        return _checked(product, lambda x, w: compact_parts(x, w).sum(0).to(x.dtype), agree)

    gate_up = parts.gate_up
    return CompactWeights(
        compact_of(parts.qkv, agree),
        summed(parts.out),
        _checked(gate_up, compact_gate, agree, gates=True) if gate_up is not None and gate_up.bias is None else None,
        summed(parts.down),
    )


def compact_of(product: Product, agree: AllClose) -> CompactWeight | None:
    """The weight of one product in compact form; None if it has none that `agree`s with the product."""
    return _checked(product, lambda x, w: compact_product(x, w, product.bias), agree)


def _checked(
    product: Product,
    run: Callable[[torch.Tensor, CompactWeight], torch.Tensor],
    agree: AllClose,
    *,
    gates: bool = False,
) -> CompactWeight | None:
    """The compact form of a product's weight; None if there is none, or if it does not give the same."""
    weight = product.weight
    try:
        found = compacted(weight, gates=gates) if can_compact(weight) else None
        if found is None:
            return None
        x = torch.randn(max(ONE_OF_EACH), weight.shape[1], device=weight.device).to(weight.dtype)
        expected = nn.functional.linear(x, weight, product.bias)
        expected = silu_mul(expected) if gates else expected
        return found if all(agree(expected[:n], run(x[:n], found)) for n in ONE_OF_EACH) else None
    except Exception:  # Triton has another form of what the kernel is written in, or memory is short
        return None
