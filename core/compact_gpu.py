"""Weights of fused layers in 12 bits each beside their own 16, without loss, for steps of few tokens on a GPU.

A step of few tokens takes as long as reading the weights does; steps of many read the originals. So both are held.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from graftlm.core.config import EngineConfig
from graftlm.core.errors import ConfigError
from graftlm.core.fuse_gpu import agree, same_shape
from graftlm.core.fuse_layers import CompactWeights, FusedLayer
from graftlm.core.layer_parts import Product
from graftlm.core.memory import free_bytes, size_of
from graftlm.kernels.compact_product import (
    MAX_ROWS,
    ONE_OF_EACH,
    can_compact,
    compact_gate,
    compact_parts,
    compact_product,
    compacted,
)
from graftlm.kernels.compact_weight import CompactWeight
from graftlm.kernels.triton_elementwise import silu_mul

if TYPE_CHECKING:
    from graftlm.core.model import LoadedModel

LARGEST_SHARE = 1 / 5
"""Of the memory that the weights leave free, which is KV's otherwise, if nobody says whether to have them."""

_SIZE = 0.76
"""Of what they are made of, lists included."""

Agree = Callable[[torch.Tensor, torch.Tensor], bool]


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


def compact_gpu(model: nn.Module, *, dry: bool = False) -> int:
    """Give every fused layer and the head their weights in compact form. -> how many products have one

    What undoes the fusions lets go of them. A weight without such a form, or one that then gives something else, is
    left as it is.

    dry  take every form for an equal one, to see what is launched; see fuse_gpu.
    """
    equal = same_shape if dry else agree
    num_compact = 0
    with torch.no_grad():
        for module in model.modules():
            fused = vars(module).get("forward")
            if not isinstance(fused, FusedLayer) or not fused.flows:
                continue
            found = _of_layer(fused, equal)
            setattr(module, "forward", replace(fused, compact=found))  # noqa: B010
            num_compact += sum(found.held)
        return num_compact + (num_compact > 0 and _head(model, equal))


def _of_layer(fused: FusedLayer, equal: Agree) -> CompactWeights:
    parts = fused.parts

    def summed(product: Product | None) -> CompactWeight | None:
        if product is None or product.bias is not None:
            return None
        return _checked(product, lambda x, w: compact_parts(x, w).sum(0).to(x.dtype), equal)

    gate_up = parts.gate_up
    return CompactWeights(
        _checked(parts.qkv, lambda x, w: compact_product(x, w, parts.qkv.bias), equal),
        summed(parts.out),
        _checked(gate_up, compact_gate, equal, gates=True) if gate_up is not None and gate_up.bias is None else None,
        summed(parts.down),
    )


def _checked(
    product: Product,
    run: Callable[[torch.Tensor, CompactWeight], torch.Tensor],
    equal: Agree,
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
        return found if all(equal(expected[:n], run(x[:n], found)) for n in ONE_OF_EACH) else None
    except Exception:  # Triton has another form of what the kernel is written in, or memory is short
        return None


def _head(model: nn.Module, equal: Agree) -> bool:
    """The same for the product that gives the logits. -> whether there is one"""
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    if type(head) is not nn.Linear or "forward" not in vars(head):
        return False
    found = _checked(Product(head.weight, head.bias), lambda x, w: compact_product(x, w, head.bias), equal)
    if found is None:
        return False
    wider = head.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if len(rows) > MAX_ROWS:
            whole: torch.Tensor = wider(x)
            return whole
        return compact_product(rows, found, head.bias).view(*x.shape[:-1], -1)

    setattr(head, "forward", forward)  # noqa: B010
    return True
