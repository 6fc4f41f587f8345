"""Shared by the attention kernels: one block of an online softmax, and how much of a dot product is rounded.

Scores are kept in base 2: exp2 is one instruction, so `scale` comes multiplied by log2(e).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LOG2E = 1.4426950408889634


@triton.jit
def softcapped(x, softcap):
    """softcap * tanh(x / softcap); x and softcap in base 2."""
    # tanh(y) = 2 / (1 + exp(-2 y)) - 1
    return softcap * (2.0 / (1.0 + tl.exp2(x / softcap * -2.8853900817779268)) - 1.0)


@triton.jit
def attend_block(
    q, k, v, ok, m, total, acc, scale, softcap,
    MASKED: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Let queries q [M, D] see tokens k [N, D], v [N, E], where ok [M or 1, N] if MASKED.

    m, total [M] and acc [M, E] are the running maximum, sum and weighted values. `scale` includes log2(e), and the
    scale of a quantised k.
    """
    x = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION) * scale
    if SOFTCAP:
        x = softcapped(x, softcap)
    if MASKED:
        x = tl.where(ok, x, -1e30)
    high = tl.maximum(m, tl.max(x, 1))
    p = tl.exp2(x - high[:, None])
    if MASKED:
        p = tl.where(ok, p, 0.0)  # a query that has seen nothing yet: its maximum is that of hidden scores
    shrink = tl.exp2(m - high)
    total = total * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc * shrink[:, None], input_precision=PRECISION)
    return high, total, acc


@triton.jit
def add_sink(sinks, head, ok, m, total, acc):
    """Let one more logit per head, `sinks[head]` (base e), take part in the softmax of m, total [M], acc [M, E]."""
    sink = tl.load(sinks + head, mask=ok, other=0.0).to(tl.float32) * 1.4426950408889634
    high = tl.maximum(m, sink)
    shrink = tl.exp2(m - high)
    return high, total * shrink + tl.exp2(sink - high), acc * shrink[:, None]


def precision(dtype: torch.dtype) -> str:
    """How a dot product of this dtype is to be computed: float32 exactly, not in tf32."""
    return "ieee" if dtype == torch.float32 else "tf32"
