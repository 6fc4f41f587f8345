"""Decode rows of layers with a state: the causal convolution, and the gated delta rule from gates to gated norm."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl


@triton.jit
def _convolve(
    x, cached, slots, weight, bias, out, x_row, slot_stride, weight_row, channels,
    BIAS: tl.constexpr, SILU: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, block of channels): each channel's inputs move on by one."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = c < channels
    place = cached + tl.load(slots + row) * slot_stride + c * (TAPS - 1)
    new = tl.load(x + row * x_row + c, mask=ok)
    total = new.to(tl.float32) * tl.load(weight + c * weight_row + TAPS - 1, mask=ok).to(tl.float32)
    for tap in tl.static_range(TAPS - 1):
        old = tl.load(place + tap, mask=ok)
        total += old.to(tl.float32) * tl.load(weight + c * weight_row + tap, mask=ok).to(tl.float32)
        if tap > 0:
            tl.store(place + tap - 1, old, mask=ok)
    tl.store(place + TAPS - 2, new, mask=ok)
    if BIAS:
        total += tl.load(bias + c, mask=ok).to(tl.float32)
    kind = out.dtype.element_ty
    if SILU:
        total = total.to(kind).to(tl.float32)
        total = total / (1.0 + tl.exp(-total))
    tl.store(out + row * channels + c, total.to(kind), mask=ok)


def convolve(
    x: torch.Tensor,
    cached: torch.Tensor,
    slots: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    silu: bool,
) -> torch.Tensor:
    """Convolve one token of each row with the row's cached inputs, and cache the token's (convolution.py).

    x       [num_rows, num_channels], last dimension dense
    cached  [num_slots, num_channels, kernel_size - 1], dense within a slot, written
    slots   int64 [num_rows]
    weight  [num_channels, kernel_size], last dimension dense; at least two taps
    -> [num_rows, num_channels], dtype of x
    """
    num_rows, channels = x.shape
    out = torch.empty(num_rows, channels, dtype=x.dtype, device=x.device)
    block = 256
    _convolve[(num_rows, triton.cdiv(channels, block))](
        x, cached, slots, weight, bias if bias is not None else x, out,
        x.stride(0), cached.stride(0), weight.stride(0), channels,
        BIAS=bias is not None, SILU=silu, TAPS=weight.shape[1], BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out


class DeltaWeights(NamedTuple):
    """The numbers of a gated delta net beside its projections.

    num_k_heads    each serves num_heads / num_k_heads consecutive heads
    a_log, dt_bias  [num_heads]
    norm_weight    [v_dim], of the gated norm, with `eps`
    """

    num_k_heads: int
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    norm_weight: torch.Tensor
    eps: float


@triton.jit
def _delta(
    mixed, a, b, z, a_log, dt_bias, norm_weight, states, slots, out,
    mixed_row, a_row, b_row, z_row, slot_stride, eps, scale, epsilon,
    HEADS: tl.constexpr, GROUP: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    K_PAD: tl.constexpr, V_PAD: tl.constexpr,
):  # fmt: skip
    """Program (row, head): reads and writes the head's state once."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i, j = tl.arange(0, K_PAD), tl.arange(0, V_PAD)
    k_ok, v_ok = i < K_DIM, j < V_DIM
    ok = k_ok[:, None] & v_ok[None, :]
    place = states + tl.load(slots + row) * slot_stride + head * K_DIM * V_DIM
    place = place + i[:, None] * V_DIM + j[None, :]
    state = tl.load(place, mask=ok, other=0.0)

    source = mixed + row * mixed_row
    num_keys: tl.constexpr = HEADS // GROUP * K_DIM
    q = tl.load(source + head // GROUP * K_DIM + i, mask=k_ok, other=0.0).to(tl.float32)
    k = tl.load(source + num_keys + head // GROUP * K_DIM + i, mask=k_ok, other=0.0).to(tl.float32)
    v = tl.load(source + 2 * num_keys + head * V_DIM + j, mask=v_ok, other=0.0).to(tl.float32)
    q = q * tl.rsqrt(tl.sum(q * q, 0) + epsilon) * scale
    k = k * tl.rsqrt(tl.sum(k * k, 0) + epsilon)
    step = tl.load(a + row * a_row + head).to(tl.float32) + tl.load(dt_bias + head).to(tl.float32)
    step = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(tl.minimum(step, 20.0))))
    decay = tl.exp(-tl.exp(tl.load(a_log + head).to(tl.float32)) * step)
    beta = 1.0 / (1.0 + tl.exp(-tl.load(b + row * b_row + head).to(tl.float32)))

    state = state * decay
    change = (v - tl.sum(k[:, None] * state, 0)) * beta
    state += k[:, None] * change[None, :]
    tl.store(place, state, mask=ok)

    kind = out.dtype.element_ty
    read = tl.sum(q[:, None] * state, 0).to(kind).to(tl.float32)  # rounded as in the model's own code
    normed = (read * tl.rsqrt(tl.sum(read * read, 0) / V_DIM + eps)).to(kind).to(tl.float32)
    normed = (tl.load(norm_weight + j, mask=v_ok, other=0.0).to(tl.float32) * normed).to(kind).to(tl.float32)
    gate = tl.load(z + row * z_row + head * V_DIM + j, mask=v_ok, other=0.0).to(tl.float32)
    result = normed * gate / (1.0 + tl.exp(-gate))
    tl.store(out + (row * HEADS + head) * V_DIM + j, result.to(kind), mask=v_ok)


def gated_delta(
    weights: DeltaWeights,
    mixed: torch.Tensor,
    gates: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    states: torch.Tensor,
    slots: torch.Tensor,
    epsilon: float,
) -> torch.Tensor:
    """Run one token of each row through the gated delta rule (delta_rule.py) and the gated norm.

    mixed    [num_rows, num_channels]: q, k and v side by side, after the convolution; last dimension dense
    gates    b and a [num_rows, num_heads], z [num_rows, num_heads * v_dim]; last dimension dense
    states   float32 [num_slots, num_heads, k_dim, v_dim], dense within a slot, written
    slots    int64 [num_rows]
    epsilon  added to the squared length of q and k
    -> [num_rows, num_heads * v_dim], dtype of mixed
    """
    b, a, z = gates
    _, heads, k_dim, v_dim = states.shape
    out = torch.empty(len(mixed), heads * v_dim, dtype=mixed.dtype, device=mixed.device)
    _delta[(len(mixed), heads)](
        mixed, a, b, z, weights.a_log, weights.dt_bias, weights.norm_weight, states, slots, out,
        mixed.stride(0), a.stride(0), b.stride(0), z.stride(0), states.stride(0), weights.eps, k_dim**-0.5, epsilon,
        HEADS=heads, GROUP=heads // weights.num_k_heads, K_DIM=k_dim, V_DIM=v_dim,
        K_PAD=triton.next_power_of_2(k_dim), V_PAD=triton.next_power_of_2(v_dim), num_warps=8,
    )  # fmt: skip
    return out
