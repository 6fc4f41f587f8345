"""A batch-invariant matmul: the result for a row depends neither on the other rows nor on their number.

Libraries choose the order of summation by the number of rows. Here one program sums each output over the inputs in a
fixed order; only the tile of a program depends on the shape, on cards whose matrix units yield equal bits for both
tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from graftlm.kernels.gpu.attention.online_softmax import precision


@triton.jit(do_not_specialize=["num_rows"])
def _product(
    x, weight, bias, out, num_rows, n_total, k_total, x_row, weight_row, out_row,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (block of outputs, block of rows); 8 blocks of rows in succession find the weights in the cache."""
    blocks_m, blocks_n = tl.cdiv(num_rows, M), tl.cdiv(n_total, N)
    program = tl.program_id(0)
    group = program // (8 * blocks_n)
    in_group = tl.minimum(blocks_m - group * 8, 8)
    inside = program % (8 * blocks_n)
    m = (group * 8 + inside % in_group) * M + tl.arange(0, M)
    n = (inside // in_group) * N + tl.arange(0, N)
    m_ok, n_ok = m < num_rows, n < n_total
    acc = tl.zeros([M, N], tl.float32)
    for first in range(0, k_total, K):
        k = first + tl.arange(0, K)
        k_ok = k < k_total
        a = tl.load(x + m.to(tl.int64)[:, None] * x_row + k[None, :], mask=m_ok[:, None] & k_ok[None, :], other=0.0)
        w = tl.load(
            weight + n.to(tl.int64)[:, None] * weight_row + k[None, :], mask=n_ok[:, None] & k_ok[None, :], other=0.0
        )
        acc = tl.dot(a, tl.trans(w), acc, input_precision=PRECISION)
    if BIAS:
        acc += tl.load(bias + n, mask=n_ok, other=0.0).to(tl.float32)[None, :]
    there = out + m.to(tl.int64)[:, None] * out_row + n[None, :]
    tl.store(there, acc.to(out.dtype.element_ty), mask=m_ok[:, None] & n_ok[None, :])


@dataclass(frozen=True)
class ProductTile:
    """The tile of a matmul: rows and outputs of a program, inputs of a step, warps, stages."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int


SMALL = ProductTile(64, 32, 128, 4, 4)
LARGE = ProductTile(128, 128, 64, 8, 3)
EXACT = ProductTile(32, 32, 32, 4, 2)  # for float32, which the matrix units do not compute exactly
MANY_ROWS = 128


class FixedProduct:
    """The linear function x @ weight.T + bias, whose rows do not depend on the batch, to the bit.

    Large tiles are for one dtype, and for cards where they yield the bits of small ones. The constructor tests that: a
    step may be a dry run (jit/precompile.py), whose results are undefined.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.dtype = dtype
        large = device.type == "cuda" and dtype != torch.float32 and _tiles_agree(device, dtype)
        self._many = LARGE if large else _few(dtype)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply x [..., k] with weight [n, k] and add bias [n]. -> [..., n], dtype of x; sums in float32"""
        rows = x.reshape(-1, x.shape[-1])
        tile = self._many if len(rows) >= MANY_ROWS and x.dtype == self.dtype else _few(x.dtype)
        return product(rows, weight, bias, tile).view(*x.shape[:-1], weight.shape[0])


def _few(dtype: torch.dtype) -> ProductTile:
    return EXACT if dtype == torch.float32 else SMALL


def _tiles_agree(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if both tiles yield equal bits on this card."""
    x, weight = (torch.randn(n, 4096, device=device, dtype=torch.float32).to(dtype) for n in (256, 256))
    return torch.equal(product(x, weight, None, SMALL), product(x, weight, None, LARGE))


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tile: ProductTile) -> torch.Tensor:
    """Compute x [num_rows, k] @ weight [n, k].T + bias [n], last dimensions dense. -> [num_rows, n], dtype of x"""
    num_rows, k = x.shape
    n = weight.shape[0]
    out = torch.empty(num_rows, n, dtype=x.dtype, device=x.device)
    _product[(triton.cdiv(num_rows, tile.rows) * triton.cdiv(n, tile.outputs),)](
        x, weight, bias if bias is not None else x, out, num_rows, n, k, x.stride(0), weight.stride(0), out.stride(0),
        M=tile.rows, N=tile.outputs, K=tile.inputs, BIAS=bias is not None, PRECISION=precision(x.dtype),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out
