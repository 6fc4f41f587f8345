"""Rows of activations in E4M3 with a scale for each row, for matmuls of E4M3 with E4M3."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from graftlm.kernels.gpu.pdl import launch_and_wait, pdl_options

_MAX = 448.0
"""The largest number of E4M3."""


class Fp8Rows(NamedTuple):
    """Rows in E4M3: codes [num_rows, k] and a scale for each row, float32 [num_rows]."""

    codes: torch.Tensor
    scale: torch.Tensor


@triton.jit
def _round(x, codes, scales, k, IN_TILES: tl.constexpr, MAX: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Program (row)."""
    launch_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    column = place
    if IN_TILES:
        column = (place & -16) + ((place >> 2) & 3) * 2 + (place & 1) + ((place >> 1) & 1) * 8
    value = tl.load(x + row * k + column, mask=place < k, other=0.0).to(tl.float32)
    # a row of zeros, or of numbers whose reciprocal is infinite, has the smallest scale
    scale = tl.maximum(tl.max(tl.abs(value), 0) / MAX, 1e-30)
    value = tl.minimum(tl.maximum(value / scale, -MAX), MAX)
    tl.store(codes + row * k + place, value.to(codes.dtype.element_ty), mask=place < k)
    tl.store(scales + row, scale)


def fp8_rows(x: torch.Tensor, *, in_tiles: bool) -> Fp8Rows:
    """Round rows x [num_rows, k], contiguous, to E4M3, each with the largest scale that it needs.

    in_tiles  each sixteen inputs in the order in which a thread holds the codes of a `TiledWeight`: 0, 1, 8, 9, 2, ...
    """
    num_rows, k = x.shape
    codes = torch.empty(num_rows, k, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(k)
    if num_rows:
        _round[(num_rows,)](
            x, codes, scale, k, IN_TILES=in_tiles, MAX=_MAX, BLOCK=block, num_warps=min(max(block // 1024, 1), 16),
            **pdl_options(x),
        )  # fmt: skip
    return Fp8Rows(codes, scale)


def exact_rows(x: torch.Tensor) -> torch.Tensor:
    """Return rows like x [num_rows, k], of 7 at most, that `fp8_rows` does not change."""
    largest = x.float().abs().amax(1, keepdim=True)
    return ((x.float() * (_MAX / largest)).to(torch.float8_e4m3fn).float() / 64).to(x.dtype)
