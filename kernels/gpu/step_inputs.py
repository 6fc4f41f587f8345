"""Kernels before the first layer of a step: its numbers, the ids of its tokens, the cosines and sines of positions.

torch needs five kernels for the ids and nine for the table, 30 us of a decode step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graftlm.kernels.jit.precompile import is_dry


@triton.jit
def _copy(source, target, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + i, tl.load(source + i, mask=i < n), mask=i < n)


@triton.jit(do_not_specialize=["num_tokens"])
def _feed(ids, sources, drawn, out, num_tokens, BLOCK: tl.constexpr):
    """Program (block of tokens)."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = i < num_tokens
    known = tl.load(ids + i, mask=ok, other=0).to(tl.int64)
    source = tl.load(sources + i, mask=ok, other=-1)
    found = tl.load(drawn + source, mask=source >= 0, other=0)
    tl.store(out + i, tl.where(source >= 0, found, known), mask=ok)


@triton.jit(do_not_specialize=["num_tokens"])
def _table(
    positions, frequencies, cos, sin, factor, num_tokens, HALF: tl.constexpr, PAD: tl.constexpr, BLOCK: tl.constexpr
):
    """Program (block of tokens)."""
    token, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, PAD)
    t_ok = token < num_tokens
    position = tl.load(positions + token, mask=t_ok, other=0).to(tl.float32)
    angle = position[:, None] * tl.load(frequencies + d, mask=d < HALF, other=0.0)[None, :]
    c, s = tl.cos(angle) * factor, tl.sin(angle) * factor
    kind = cos.dtype.element_ty
    at = token.to(tl.int64)[:, None] * (2 * HALF) + d[None, :]
    ok = t_ok[:, None] & (d < HALF)[None, :]
    tl.store(cos + at, c.to(kind), mask=ok)
    tl.store(cos + at + HALF, c.to(kind), mask=ok)
    tl.store(sin + at, s.to(kind), mask=ok)
    tl.store(sin + at + HALF, s.to(kind), mask=ok)


def copy_words(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy int32 [n], both contiguous, by a kernel: between other kernels it is faster than a device copy."""
    _copy[(triton.cdiv(len(source), 1024),)](source, target, len(source), BLOCK=1024, num_warps=4)


def feed_tokens(ids: torch.Tensor, sources: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """Return ids [num_tokens] with drawn[source] in place of an id whose source is not -1. -> int64 [num_tokens]"""
    # a dry run launches nothing, but its ids are still looked up in the embedding
    make = torch.zeros if is_dry() else torch.empty
    out = make(len(ids), dtype=torch.int64, device=ids.device)
    block = 128
    _feed[(triton.cdiv(len(ids), block),)](ids, sources, drawn, out, len(ids), BLOCK=block, num_warps=4)
    return out


def rotary_table(
    positions: torch.Tensor, frequencies: torch.Tensor, factor: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute factor * cos and sin of each position times each frequency, both halves equal.

    positions  int32 or int64 [num_tokens]; frequencies float32 [dim / 2]
    -> cos, sin [num_tokens, dim] of `dtype`
    """
    num_tokens, half = len(positions), len(frequencies)
    cos = torch.empty(num_tokens, 2 * half, dtype=dtype, device=positions.device)
    sin = torch.empty_like(cos)
    block = 1 if num_tokens <= 16 else 16
    _table[(triton.cdiv(num_tokens, block),)](
        positions, frequencies, cos, sin, factor, num_tokens, HALF=half, PAD=triton.next_power_of_2(half), BLOCK=block,
        num_warps=1 if block == 1 else 4,
        enable_fp_fusion=False,  # an angle is rounded before its reduction, as in torch
    )  # fmt: skip
    return cos, sin
