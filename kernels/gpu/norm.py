"""Norms on a GPU, alone or fused with the preceding sums: one kernel adds to the residual stream and norms it."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from graftlm.kernels.gpu.pdl import grid_wait, launch_dependents, pdl_options
from graftlm.kernels.norm import Addition, Norm

_AS_IT_IS = Addition()


class Beside(NamedTuple):
    """A second addend of the residual stream, beside parts: that of a mixture's shared experts.

    values  [num_rows, n], last dimension dense
    x       like values, and gate [n]: sigmoid(x @ gate) multiplies each row; None without a gate
    """

    values: torch.Tensor
    x: torch.Tensor | None = None
    gate: torch.Tensor | None = None


@triton.jit
def normed_row(value, ok, scale, n, eps, ROUNDED: tl.constexpr, CENTERED: tl.constexpr, KIND: tl.constexpr):
    """Return scale * (value, normed) in float32; rounded to KIND as in the models' own code."""
    if CENTERED:
        value = tl.where(ok, value - tl.sum(value, 0) / n, 0.0)
    normed = value * tl.rsqrt(tl.sum(value * value, 0) / n + eps)
    if ROUNDED:
        normed = normed.to(KIND).to(tl.float32)
    return scale.to(tl.float32) * normed


@triton.jit
def _norm(
    x, bias, post_weight, residual, weight, shift, out, beside, gate_x, gate, x_row, x_part, out_row, beside_row,
    gate_row, n, factor, whole_factor, post_eps, eps,
    PARTS: tl.constexpr, BIAS: tl.constexpr, BESIDE: tl.constexpr, GATED: tl.constexpr, POST: tl.constexpr,
    POST_ROUNDED: tl.constexpr, SCALED: tl.constexpr, WHOLE_SCALED: tl.constexpr, NORM: tl.constexpr,
    ROUNDED: tl.constexpr, CENTERED: tl.constexpr, SHIFTED: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row). Operands that no kernel writes are read early."""
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    ok = i < n
    kind = residual.dtype.element_ty
    if NORM:
        scale = tl.load(weight + i, mask=ok, other=0.0)
    if POST:
        post_scale = tl.load(post_weight + i, mask=ok, other=0.0)
    if BIAS:
        added = tl.load(bias + i, mask=ok, other=0.0).to(tl.float32)
    grid_wait(PDL)
    value = tl.load(x + row * x_row + i, mask=ok, other=0.0).to(tl.float32)
    if PARTS:
        before = tl.load(residual + row * n + i, mask=ok, other=0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            value += tl.load(x + part * x_part + row * x_row + i, mask=ok, other=0.0).to(tl.float32)
        if BIAS:
            value += added
        if BESIDE:
            second = tl.load(beside + row * beside_row + i, mask=ok, other=0.0).to(tl.float32)
            if GATED:
                gates = tl.load(gate + i, mask=ok, other=0.0).to(tl.float32)
                inputs = tl.load(gate_x + row * gate_row + i, mask=ok, other=0.0).to(tl.float32)
                logit = tl.sum(inputs * gates, 0).to(kind).to(tl.float32)
                second = (second * (1.0 / (1.0 + tl.exp(-logit))).to(kind).to(tl.float32)).to(kind).to(tl.float32)
            value = value.to(kind).to(tl.float32) + second
        if POST:
            value = normed_row(value, ok, post_scale, n, post_eps, POST_ROUNDED, False, kind).to(kind).to(tl.float32)
        if SCALED:
            value = (value * factor).to(kind).to(tl.float32)
        rounded = (value + before).to(kind)
        if WHOLE_SCALED:
            rounded = (rounded.to(tl.float32) * whole_factor).to(kind)
        tl.store(residual + row * n + i, rounded, mask=ok)
        value = rounded.to(tl.float32)
    if NORM:
        value = normed_row(value, ok, scale, n, eps, ROUNDED, CENTERED, kind)
        if SHIFTED:
            value += tl.load(shift + i, mask=ok, other=0.0).to(tl.float32)
        tl.store(out + row * out_row + i, value.to(kind), mask=ok)


def norm_rows(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """Apply `norm` (kernels/norm.py) to x [..., n]. -> [..., n], dtype of x"""
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(-1) != 1:  # a view of transposed features
        rows = rows.contiguous()
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    _launch(rows, rows, norm, out)
    return out.view(x.shape)


def norm_rows_(x: torch.Tensor, norm: Norm) -> None:
    """Apply `norm` to x [num_rows, n], last dimension dense, in place."""
    _launch(x, x, norm, x)


def add_norm(
    parts: torch.Tensor,
    residual: torch.Tensor,
    norm: Norm | None,
    bias: torch.Tensor | None = None,
    addition: Addition | None = None,
    *,
    beside: Beside | None = None,
    strict: bool = False,
) -> torch.Tensor:
    """Add the sum of all parts and bias to the residual, in place, as `addition` says.

    parts  [num_parts, num_rows, n], contiguous; residual [num_rows, n], contiguous; bias [n]
    beside  added to that sum before `addition` takes it
    strict a row's sums have one order for every number of rows
    -> the residual after `norm` [num_rows, n], its dtype; the residual itself without one
    """
    out = torch.empty_like(residual) if norm is not None else residual
    _launch(parts, residual, norm, out, bias, addition or _AS_IT_IS, beside, strict=strict)
    return out


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm: Norm | None,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    addition: Addition = _AS_IT_IS,
    beside: Beside | None = None,
    *,
    strict: bool = False,
) -> None:
    """Launch the kernel. x: rows [num_rows, n] to be normed, or parts [num_parts, num_rows, n] to be added"""
    (num_rows, n), (post, factor, whole_factor) = residual.shape, addition
    num_parts = len(x) if x.dim() == 3 else 0
    assert post is None or not (post.centered or post.bias is not None)
    second, gate_x, gate = (x if given is None else given for given in beside or (None, None, None))
    assert gate is x or gate.shape == (n,)
    block = triton.next_power_of_2(n)
    # parts have few rows, so the latency of a row is the total time: a thread has at most four of its numbers
    most = 8 if not num_parts else 16 if num_rows > 32 or strict else 32
    warps = most if n > 2048 else max(block // 128, 4) if num_parts and num_rows <= 32 and not strict else 4
    _norm[(num_rows,)](
        x, bias if bias is not None else x, post.weight if post is not None else x, residual,
        norm.weight if norm is not None else x, norm.bias if norm is not None and norm.bias is not None else x, out,
        second, gate_x, gate, x.stride(-2), x.stride(-2) * num_rows, out.stride(0), second.stride(0), gate_x.stride(0),
        n, factor, whole_factor, post.eps if post is not None else 0.0,
        norm.eps if norm is not None else 0.0,
        PARTS=num_parts, BIAS=bias is not None, BESIDE=beside is not None, GATED=gate is not x,
        POST=post is not None, POST_ROUNDED=post is not None and post.rounded,
        SCALED=factor != 1.0, WHOLE_SCALED=whole_factor != 1.0,
        NORM=norm is not None, ROUNDED=norm is not None and norm.rounded,
        CENTERED=norm is not None and norm.centered, SHIFTED=norm is not None and norm.bias is not None,
        BLOCK=block, num_warps=warps, **pdl_options(x),
    )  # fmt: skip
