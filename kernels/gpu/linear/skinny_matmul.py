"""The matmul of a few rows with a large weight, for decoding a batch: bound by reading the weight.

Unlike a library's matmul of equal shape it starts while the previous kernel ends, fuses the gate of an MLP, and leaves
the sum over its parts to the next norm, which reads them anyway. The largest matmuls of one row are faster by gemv.py;
from about a hundred rows on arithmetic dominates, and the library is faster.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from graftlm.kernels.activation import Activation
from graftlm.kernels.gpu.activation import activated
from graftlm.kernels.gpu.attention.online_softmax import precision
from graftlm.kernels.gpu.pdl import launch_and_wait, pdl_options
from graftlm.kernels.gpu.support import card_of

MAX_PARTS = 8


@triton.jit(do_not_specialize=["num_rows"])
def _skinny(
    x, weight, bias, out, num_rows, n_total, k_total, x_row, weight_row,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    GATED: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (block of outputs, part of the inputs). The weight is the first factor, so that the rows may be few."""
    launch_and_wait(PDL)
    n, m, kk = tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, M), tl.arange(0, K)
    split = tl.program_id(1)
    n_ok, m_ok = n < n_total, m < num_rows
    per_split = tl.cdiv(tl.cdiv(k_total, SPLITS), K) * K
    begins = split * per_split
    here = weight + n.to(tl.int64)[:, None] * weight_row + kk[None, :]
    there = here + n_total.to(tl.int64) * weight_row  # up projection of a gate
    rows = x + m[None, :] * x_row + kk[:, None]
    acc = tl.zeros([N, M], tl.float32)
    acc_up = tl.zeros([N, M], tl.float32)
    for first in tl.range(begins, tl.minimum(begins + per_split, k_total), K, num_stages=STAGES):
        k_ok = first + kk < k_total
        ok = n_ok[:, None] & k_ok[None, :]
        w = tl.load(here + first, mask=ok, other=0.0, eviction_policy="evict_first")
        value = tl.load(rows + first, mask=m_ok[None, :] & k_ok[:, None], other=0.0)
        acc = tl.dot(w, value, acc, input_precision=PRECISION)
        if GATED:
            w_up = tl.load(there + first, mask=ok, other=0.0, eviction_policy="evict_first")
            acc_up = tl.dot(w_up, value, acc_up, input_precision=PRECISION)
    if BIAS:
        acc += tl.load(bias + n, mask=n_ok, other=0.0).to(tl.float32)[:, None]
    kind = out.dtype.element_ty
    if GATED:
        # rounded as in separate kernels
        gate = acc.to(kind).to(tl.float32)
        acc = activated(gate, ACTIVATION).to(kind).to(tl.float32) * acc_up.to(kind).to(tl.float32)
    target = out + (split * num_rows + m)[None, :] * n_total + n[:, None]
    tl.store(target, acc.to(kind), mask=n_ok[:, None] & m_ok[None, :])


@dataclass(frozen=True)
class SkinnyTile:
    """The tile of the kernel: outputs of a program, inputs of a step, parts of the inputs, stages."""

    outputs: int
    inputs: int
    splits: int
    stages: int


WHOLE = SkinnyTile(64, 128, 1, 5)
GATED = SkinnyTile(64, 128, 1, 4)
"""The fastest measured tile of gated matmuls."""


def parts_tile(n: int, num_rows: int, num_sms: int) -> SkinnyTile:
    """Return the tile: as many parts as run concurrently, and more inputs a step if the rows are few."""
    inputs, stages = (256, 3) if num_rows <= 16 else (128, 6)
    return SkinnyTile(64, inputs, min(max(num_sms // triton.cdiv(n, 64), 1), MAX_PARTS), stages)


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    tile: SkinnyTile,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: Activation | None = None,
) -> None:
    num_rows, k = x.shape
    n = out.shape[-1]
    rows = max(16, triton.next_power_of_2(num_rows))
    one_read = (tile.outputs * (2 if activation is not None else 1) + rows) * tile.inputs * x.element_size()
    _skinny[(triton.cdiv(n, tile.outputs), tile.splits)](
        x, weight, bias if bias is not None else x, out, num_rows, n, k, x.stride(0), weight.stride(0),
        M=rows, N=tile.outputs, K=tile.inputs, SPLITS=tile.splits,
        STAGES=max(min(tile.stages, card_of(x.device).shared_memory // one_read), 1),
        GATED=activation is not None, ACTIVATION=activation or "", BIAS=bias is not None,
        PRECISION=precision(x.dtype), num_warps=4, **pdl_options(x),
    )  # fmt: skip


def skinny_matmul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute x [num_rows, k] @ weight [n, k].T + bias [n], last dimensions dense. -> [num_rows, n], dtype of x

    Sums are in float32.
    """
    out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    _launch(x, weight, WHOLE, out, bias)
    return out


def skinny_gate_up(x: torch.Tensor, weight: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
    """Compute activation(gate) * up of x [num_rows, k] @ weight [2 n, k].T, gates first. -> [num_rows, n]"""
    out = torch.empty(x.shape[0], weight.shape[0] // 2, dtype=x.dtype, device=x.device)
    _launch(x, weight, GATED, out, activation=activation)
    return out


def skinny_parts(x: torch.Tensor, weight: torch.Tensor, tile: SkinnyTile | None = None) -> torch.Tensor:
    """Compute the parts whose sum is x [num_rows, k] @ weight [n, k].T. -> float32 [num_parts, num_rows, n]"""
    tile = tile or parts_tile(weight.shape[0], x.shape[0], card_of(x.device).num_sms)
    out = torch.empty(tile.splits, x.shape[0], weight.shape[0], dtype=torch.float32, device=x.device)
    _launch(x, weight, tile, out)
    return out
