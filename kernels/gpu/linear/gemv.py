"""The matmul of one row with a very large weight, for decoding a single sequence: bound by reading the weight.

Each program streams a few whole rows of the weight, so no sums are split or joined, and the gate of an MLP is fused.
Two rows or more, and smaller weights, are faster through the matrix units: see skinny_matmul.py and bench/notes/gpu.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from graftlm.kernels.activation import Activation
from graftlm.kernels.gpu.activation import activated
from graftlm.kernels.gpu.pdl import grid_wait, launch_dependents, pdl_options


@triton.jit
def _take(w, w_up, x, first, k_total, acc, acc_up, K: tl.constexpr, GATED: tl.constexpr):
    """Add the products of one block of weights [N, K] with inputs [first, first + K)."""
    k = first + tl.arange(0, K)
    value = tl.load(x + k, mask=k < k_total, other=0.0).to(tl.float32)
    acc += w.to(tl.float32) * value[None, :]
    if GATED:
        acc_up += w_up.to(tl.float32) * value[None, :]
    return acc, acc_up


@triton.jit
def _gemv(
    x, weight, bias, out, n_total, k_total, weight_row,
    N: tl.constexpr, K: tl.constexpr, STAGES: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (block of outputs): all of their weights."""
    n, k = tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, K)
    n_ok = n < n_total
    here = weight + n.to(tl.int64)[:, None] * weight_row + k[None, :]
    there = here + n_total.to(tl.int64) * weight_row  # up projection of a gate
    acc = tl.zeros([N, K], tl.float32)
    acc_up = tl.zeros([N, K], tl.float32)
    launch_dependents(PDL)
    ok = n_ok[:, None] & (k < k_total)[None, :]
    w = tl.load(here, mask=ok, other=0.0, eviction_policy="evict_first")
    w_up = w
    if GATED:
        w_up = tl.load(there, mask=ok, other=0.0, eviction_policy="evict_first")
    grid_wait(PDL)  # the first weights are in flight before the inputs are complete
    acc, acc_up = _take(w, w_up, x, 0, k_total, acc, acc_up, K, GATED)
    for first in tl.range(K, k_total, K, num_stages=STAGES):
        ok = n_ok[:, None] & (first + k < k_total)[None, :]
        w = tl.load(here + first, mask=ok, other=0.0, eviction_policy="evict_first")
        w_up = w
        if GATED:
            w_up = tl.load(there + first, mask=ok, other=0.0, eviction_policy="evict_first")
        acc, acc_up = _take(w, w_up, x, first, k_total, acc, acc_up, K, GATED)
    y, y_up = tl.sum(acc, 1), tl.sum(acc_up, 1)
    if BIAS:
        y += tl.load(bias + n, mask=n_ok, other=0.0).to(tl.float32)
        if GATED:
            y_up += tl.load(bias + n_total + n, mask=n_ok, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    if GATED:
        # rounded as in separate kernels
        gate = y.to(kind).to(tl.float32)
        y = activated(gate, ACTIVATION).to(kind).to(tl.float32) * y_up.to(kind).to(tl.float32)
    tl.store(out + n, y.to(kind), mask=n_ok)


@dataclass(frozen=True)
class GemvTile:
    """The tile of the kernel: outputs of a program, inputs of a step, warps, stages."""

    outputs: int
    inputs: int
    warps: int
    stages: int


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: Activation | None = None,
    tile: GemvTile | None = None,
) -> torch.Tensor:
    """Compute x @ weight.T + bias for one row.

    x       [1, k], dense
    weight  [n, k], last dimension dense; with an activation [2 n, k], gates first, for activation(gate) * up
    -> [1, n], dtype of x; sums in float32
    """
    k = x.shape[1]
    gated = activation is not None
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    out = torch.empty(1, n, dtype=x.dtype, device=x.device)
    tile = tile or tile_of(n, k, gated)
    _gemv[(triton.cdiv(n, tile.outputs),)](
        x, weight, bias if bias is not None else x, out, n, k, weight.stride(0), N=tile.outputs, K=tile.inputs,
        STAGES=tile.stages, GATED=gated, ACTIVATION=activation or "", BIAS=bias is not None,
        num_warps=tile.warps, **pdl_options(x),
    )  # fmt: skip
    return out


def tile_of(n: int, k: int, gated: bool) -> GemvTile:
    """Return the fastest measured tile of a gated, a short or a long matmul."""
    if gated:
        return GemvTile(2, 1024, 2, 4)
    return GemvTile(8, 512, 2, 4) if n * k < 1 << 25 else GemvTile(8, 256, 2, 5)
