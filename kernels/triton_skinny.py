"""Products of a few rows with a large weight, as decoding needs them: bound by how fast the weight is read.

Each program streams a few rows of the weight, whole, so nothing is split or joined, and takes in what comes before and
after the product: the norm of the input, the gate of an MLP, the sum with the residual. Norms are applied after the
product, which is linear in a row's factor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from graftlm.kernels.triton_softmax import precision

MAX_ROWS = 16


@triton.jit
def _take(
    w, w_up, x, norm, first, num_rows, k_total, x_row, acc, acc_up, squares,
    ROWS: tl.constexpr, K: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the products of one block of weights with inputs [first, first + K)."""
    k = first + tl.arange(0, K)
    k_ok = k < k_total
    if ROWS == 1:
        value = tl.load(x + k, mask=k_ok, other=0.0).to(tl.float32)
        if NORM:
            squares += value * value
            value *= tl.load(norm + k, mask=k_ok, other=0.0).to(tl.float32)
        acc += w.to(tl.float32) * value[None, :]
        if GATED:
            acc_up += w_up.to(tl.float32) * value[None, :]
    else:
        r = tl.arange(0, ROWS)
        rows = tl.load(x + r[:, None] * x_row + k[None, :], mask=(r < num_rows)[:, None] & k_ok[None, :], other=0.0)
        if NORM:
            value = rows.to(tl.float32)
            squares += tl.sum(value * value, 1)
            rows = (value * tl.load(norm + k, mask=k_ok, other=0.0).to(tl.float32)[None, :]).to(w.dtype)
        acc = tl.dot(w, tl.trans(rows), acc, input_precision=PRECISION)
        if GATED:
            acc_up = tl.dot(w_up, tl.trans(rows), acc_up, input_precision=PRECISION)
    return acc, acc_up, squares


@triton.jit(do_not_specialize=["num_rows"])
def _skinny(
    x, weight, bias, norm, residual, out, num_rows, n_total, k_total, eps, x_row, weight_row, out_row, residual_row,
    ROWS: tl.constexpr, N: tl.constexpr, K: tl.constexpr, STAGES: tl.constexpr,
    NORM: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, PRECISION: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (block of outputs): all of their weights, for all rows."""
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
    n, r = tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, ROWS)
    n_ok, r_ok = n < n_total, r < num_rows
    here = weight + n.to(tl.int64)[:, None] * weight_row
    there = here + n_total.to(tl.int64) * weight_row  # of the factor that a gate is for
    if ROWS == 1:
        acc = tl.zeros([N, K], tl.float32)
        acc_up = tl.zeros([N, K], tl.float32)
        squares = tl.zeros([K], tl.float32)
    else:
        acc = tl.zeros([N, ROWS], tl.float32)
        acc_up = tl.zeros([N, ROWS], tl.float32)
        squares = tl.zeros([ROWS], tl.float32)
    k = tl.arange(0, K)
    ok = n_ok[:, None] & (k < k_total)[None, :]
    w = tl.load(here + k[None, :], mask=ok, other=0.0, eviction_policy="evict_first")
    w_up = w
    if GATED:
        w_up = tl.load(there + k[None, :], mask=ok, other=0.0, eviction_policy="evict_first")
    if CHAINED:
        tl.extra.cuda.gdc_wait()  # the first weights are on their way before the inputs are there
    acc, acc_up, squares = _take(
        w, w_up, x, norm, 0, num_rows, k_total, x_row, acc, acc_up, squares, ROWS, K, NORM, GATED, PRECISION
    )
    for first in tl.range(K, k_total, K, num_stages=STAGES):
        ok = n_ok[:, None] & (first + k < k_total)[None, :]
        w = tl.load(here + first + k[None, :], mask=ok, other=0.0, eviction_policy="evict_first")
        w_up = w
        if GATED:
            w_up = tl.load(there + first + k[None, :], mask=ok, other=0.0, eviction_policy="evict_first")
        acc, acc_up, squares = _take(
            w, w_up, x, norm, first, num_rows, k_total, x_row, acc, acc_up, squares, ROWS, K, NORM, GATED, PRECISION
        )
    if ROWS == 1:
        y = tl.sum(acc, 1)[:, None]
        y_up = tl.sum(acc_up, 1)[:, None]
        total = tl.zeros([ROWS], tl.float32) + tl.sum(squares, 0)
    else:
        y, y_up, total = acc, acc_up, squares
    if NORM:
        factor = tl.rsqrt(total / k_total + eps)[None, :]
        y *= factor
        y_up *= factor
    if BIAS:
        y += tl.load(bias + n, mask=n_ok, other=0.0).to(tl.float32)[:, None]
        if GATED:
            y_up += tl.load(bias + n_total + n, mask=n_ok, other=0.0).to(tl.float32)[:, None]
    kind = out.dtype.element_ty
    ok = n_ok[:, None] & r_ok[None, :]
    if GATED:
        # rounded where separate kernels round
        gate = y.to(kind).to(tl.float32)
        y = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32) * y_up.to(kind).to(tl.float32)
    if RESIDUAL:
        y += tl.load(residual + r[None, :] * residual_row + n[:, None], mask=ok, other=0.0).to(tl.float32)
    tl.store(out + r[None, :] * out_row + n[:, None], y.to(kind), mask=ok)


class Norm(NamedTuple):
    """An RMSNorm: weight [n] and epsilon."""

    weight: torch.Tensor
    eps: float


@dataclass(frozen=True)
class SkinnyTile:
    """How the kernel is cut: outputs of a program, inputs read at once, warps, and how many reads are under way."""

    outputs: int
    inputs: int
    warps: int
    stages: int


def skinny_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm: Norm | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    tile: SkinnyTile | None = None,
    chained: bool = False,
) -> torch.Tensor:
    """x @ weight.T + bias, for up to MAX_ROWS rows.

    x         [num_rows, k], last dimension dense; with `norm`, x is normed first
    weight    [n, k], last dimension dense; `gated`: [2 n, k], the gates first, the answer is silu(gate) * other
    residual  [num_rows, n], last dimension dense: the answer is added to it, in place, and it is returned
    chained   start while the kernel before still runs, where the card can
    -> [num_rows, n], dtype of x; sums in float32
    """
    num_rows, k = x.shape
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    out = residual if residual is not None else torch.empty(num_rows, n, dtype=x.dtype, device=x.device)
    tile = tile or tile_of(num_rows, n, k, gated)
    _skinny[(triton.cdiv(n, tile.outputs),)](
        x, weight, bias if bias is not None else x, norm.weight if norm is not None else x, out, out,
        num_rows, n, k, norm.eps if norm is not None else 0.0, x.stride(0), weight.stride(0), out.stride(0),
        out.stride(0), ROWS=1 if num_rows == 1 else MAX_ROWS, N=tile.outputs, K=tile.inputs, STAGES=tile.stages,
        NORM=norm is not None, GATED=gated, BIAS=bias is not None, RESIDUAL=residual is not None,
        PRECISION=precision(x.dtype), num_warps=tile.warps, CHAINED=chained, **launch_options(chained),
    )  # fmt: skip
    return out


def launch_options(chained: bool) -> dict[str, bool]:
    """Options of a launch that may begin before the kernel before it has ended."""
    return {"launch_pdl": True} if chained else {}


def tile_of(num_rows: int, n: int, k: int, gated: bool) -> SkinnyTile:
    """The tile that is fastest for a product of this shape."""
    if num_rows == 1:
        return SkinnyTile(8 if gated else 16, 512, 4, 3)
    return SkinnyTile(16, 256, 4, 4)
