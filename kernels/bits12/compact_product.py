"""Where products of few rows read their weight in 12 bits (compact_weight.py) instead of 16."""

from __future__ import annotations

import torch

from graftlm.kernels.bits12.weight_codec import INPUTS, CompactWeight, encode
from graftlm.kernels.hopper.flow_product import num_parts
from graftlm.kernels.hopper.support import gluon_kernel, takes

MAX_ROWS = 32
"""More take longer than the products that read all 16 bits."""

ONE_OF_EACH = (1, 17)
"""Numbers of rows that are multiplied in different ways."""

_LARGEST_LIST = 1 / 2000
"""Of the weights: 32 rows take longer than products that read all 16 bits from about 1 in 2,700 on, fewer gain."""

_SHORTEST = 2 * INPUTS
"""Inputs of a part at least."""


def can_compact(weight: torch.Tensor) -> bool:
    """Whether these products could take `weight` [n, k]: bfloat16 on Hopper, dense, k in 64s and at least 256."""
    suits = weight.dtype is torch.bfloat16 and takes(weight) and weight.shape[1] >= _SHORTEST
    return suits and gluon_kernel("bits12.matmul") is not None


def compacted(weight: torch.Tensor, *, gates: bool = False) -> CompactWeight | None:
    """The compact form of a weight; None if it has none, or one with a long list or that is not much smaller.

    gates  for `compact_gate`: [2 n, k], the gates first, n in eights
    """
    if gates:
        n, k = weight.shape[0] // 2, weight.shape[1]
        if n % 8:
            return None
        weight = weight.view(2, n // 8, 8, k).transpose(0, 1).reshape(2 * n, k)
    found = encode(weight)
    if found is None or len(found.inputs) > _LARGEST_LIST * weight.numel() or found.nbytes > 0.9 * weight.nbytes:
        return None
    return found


def compact_product(x: torch.Tensor, weight: CompactWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [num_rows, k] @ weight.T + bias [n]. -> [num_rows, n], dtype of x

    x contiguous bfloat16, up to 32 rows. Sums are in float32.
    """
    out = torch.empty(1, x.shape[0], weight.num_outputs, dtype=x.dtype, device=x.device)
    _launch(x, weight, out, bias)
    return out[0]


def compact_parts(x: torch.Tensor, weight: CompactWeight) -> torch.Tensor:
    """What x [num_rows, k] @ weight.T is the sum of. -> float32 [num_parts, num_rows, n]"""
    n, k = weight.num_outputs, weight.num_inputs
    parts = min(num_parts(n, k, x.device), k // _SHORTEST)
    out = torch.empty(parts, x.shape[0], n, dtype=torch.float32, device=x.device)
    _launch(x, weight, out)
    return out


def compact_gate(x: torch.Tensor, weight: CompactWeight) -> torch.Tensor:
    """silu(gate) * up, where x [num_rows, k] @ weight.T is both, eight beside eight (`compacted`). -> [num_rows, n / 2]

    Both factors are rounded before they are multiplied, as separate kernels do.
    """
    out = torch.empty(1, x.shape[0], weight.num_outputs // 2, dtype=x.dtype, device=x.device)
    _launch(x, weight, out, gate=True)
    return out[0]


def _launch(
    x: torch.Tensor, weight: CompactWeight, out: torch.Tensor, bias: torch.Tensor | None = None, *, gate: bool = False
) -> None:
    kernel = gluon_kernel("bits12.matmul")
    assert kernel is not None and len(x) <= MAX_ROWS and x.dtype is torch.bfloat16
    kernel.launch(x, weight, out, bias, gate=gate)
