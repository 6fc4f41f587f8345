"""Partial attention results joined by log-sum-exp on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _merge(
    out, lse, other, other_lse, index, num_heads, out_token, out_head, other_token, other_head, lse_head,
    other_lse_head,
    D: tl.constexpr, D_PAD: tl.constexpr, HEADS: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    token = i
    if INDEX:
        token = tl.load(index + i)
    h, d = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, D_PAD)
    h_ok = h < num_heads
    ok = h_ok[:, None] & (d < D)[None, :]
    a = tl.load(lse + h * lse_head + token, mask=h_ok, other=0.0)
    b = tl.load(other_lse + h * other_lse_head + i, mask=h_ok, other=0.0)
    high = tl.maximum(a, b)
    wa, wb = tl.exp(a - high), tl.exp(b - high)
    total = wa + wb
    here = out + token * out_token + h[:, None] * out_head + d[None, :]
    x = tl.load(here, mask=ok, other=0.0).to(tl.float32)
    y = tl.load(other + i * other_token + h[:, None] * other_head + d[None, :], mask=ok, other=0.0).to(tl.float32)
    merged = x * (wa / total)[:, None] + y * (wb / total)[:, None]
    tl.store(here, merged.to(out.dtype.element_ty), mask=ok)
    tl.store(lse + h * lse_head + token, high + tl.log(total), mask=h_ok)


def merge_into(
    out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor, index: torch.Tensor | None
) -> None:
    """Add to the attention of some tokens what they see of further keys, in place.

    out    [num_tokens, num_heads, head_dim], lse float32 [num_heads, num_tokens]
    other  the same of the tokens `index` (int64; None: all), and `other_lse`
    """
    num, num_heads, dim = other.shape
    heads = min(triton.next_power_of_2(num_heads), 16)
    _merge[(num, triton.cdiv(num_heads, heads))](
        out, lse, other, other_lse, index if index is not None else lse, num_heads,
        out.stride(0), out.stride(1), other.stride(0), other.stride(1), lse.stride(0), other_lse.stride(0),
        D=dim, D_PAD=triton.next_power_of_2(dim), HEADS=heads, INDEX=index is not None, num_warps=4,
    )  # fmt: skip
