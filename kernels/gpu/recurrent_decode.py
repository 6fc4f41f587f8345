"""Decode rows of layers with a state: the causal convolution, the gated delta rule from gates to gated norm, and the
selective scan."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from graftlm.kernels.gpu.pdl import grid_wait, launch_dependents, pdl_options


@triton.jit
def _convolve(
    x, columns, cached, slots, weight, bias, out, x_row, slot_stride, weight_row, channels,
    COLUMNS: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, block of channels): each channel's inputs move on by one."""
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = c < channels
    place = cached + tl.load(slots + row) * slot_stride + c * (TAPS - 1)
    column = tl.load(columns + c, mask=ok) if COLUMNS else c
    grid_wait(PDL)
    new = tl.load(x + row * x_row + column, mask=ok)
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
    columns: torch.Tensor | None = None,
) -> torch.Tensor:
    """Convolve one token of each row with the row's cached inputs, and cache the token's (convolution.py).

    x       [num_rows, num_channels], last dimension dense; with more channels, in any order, where `columns` names them
    cached  [num_slots, num_channels, kernel_size - 1], dense within a slot, written
    slots   int64 [num_rows]
    weight  [num_channels, kernel_size], last dimension dense; at least two taps
    columns  int64 [num_channels]: where x has each channel
    -> [num_rows, num_channels], dtype of x
    """
    num_rows, channels = len(x), cached.shape[1]
    out = torch.empty(num_rows, channels, dtype=x.dtype, device=x.device)
    block = 256
    _convolve[(num_rows, triton.cdiv(channels, block))](
        x, columns if columns is not None else slots, cached, slots, weight, bias if bias is not None else x, out,
        x.stride(0), cached.stride(0), weight.stride(0), channels,
        COLUMNS=columns is not None, BIAS=bias is not None, SILU=silu, TAPS=weight.shape[1], BLOCK=block, num_warps=4,
        **pdl_options(x),
    )  # fmt: skip
    return out


VALUES = 32
"""Columns of a state for one program: 16 KB, so that several programs of a multiprocessor load at once."""


class DeltaWeights(NamedTuple):
    """The numbers of a gated delta net beside its projections.

    num_k_heads    each serves num_heads / num_k_heads consecutive heads
    a_log, dt_bias  [num_heads]; dt_bias [num_heads * k_dim] where each channel of a key decays by itself (Kimi)
    norm_weight    [v_dim], of the gated norm, with `eps`
    sigmoid        whether the gate of the norm is a sigmoid, and nothing is rounded between (Kimi); else SiLU
    max_beta       beta is from 0 to this
    bound          the least log of a decay, reached by a sigmoid; None: softplus without a bound
    """

    num_k_heads: int
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    norm_weight: torch.Tensor
    eps: float
    sigmoid: bool = False
    max_beta: float = 1.0
    bound: float | None = None


@triton.jit
def _delta(
    mixed, a, b, a_log, dt_bias, states, slots, read_out,
    mixed_row, a_row, a_head, b_row, b_head, slot_stride, scale, epsilon, max_beta, bound,
    HEADS: tl.constexpr, GROUP: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    K_PAD: tl.constexpr, BLOCK: tl.constexpr, CHANNELS: tl.constexpr, BOUND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, head, block of values): reads and writes its part of the head's state once.

    CHANNELS  a decay for each channel of the keys: a [num_rows, num_heads * K_DIM]
    """
    launch_dependents(PDL)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i, j = tl.arange(0, K_PAD), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    k_ok, v_ok = i < K_DIM, j < V_DIM
    ok = k_ok[:, None] & v_ok[None, :]
    place = states + tl.load(slots + row) * slot_stride + head * K_DIM * V_DIM
    place = place + i[:, None] * V_DIM + j[None, :]
    grid_wait(PDL)
    state = tl.load(place, mask=ok, other=0.0)

    source = mixed + row * mixed_row
    num_keys: tl.constexpr = HEADS // GROUP * K_DIM
    q = tl.load(source + head // GROUP * K_DIM + i, mask=k_ok, other=0.0).to(tl.float32)
    k = tl.load(source + num_keys + head // GROUP * K_DIM + i, mask=k_ok, other=0.0).to(tl.float32)
    v = tl.load(source + 2 * num_keys + head * V_DIM + j, mask=v_ok, other=0.0).to(tl.float32)
    q = q * tl.rsqrt(tl.sum(q * q, 0) + epsilon) * scale
    k = k * tl.rsqrt(tl.sum(k * k, 0) + epsilon)
    group, member = head // GROUP, head % GROUP
    if CHANNELS:
        step = tl.load(a + row * a_row + head * K_DIM + i, mask=k_ok, other=0.0).to(tl.float32)
        step += tl.load(dt_bias + head * K_DIM + i, mask=k_ok, other=0.0).to(tl.float32)
    else:
        step = tl.load(a + row * a_row + group * a_head + member).to(tl.float32)
        step += tl.load(dt_bias + head).to(tl.float32)
    rate = tl.exp(tl.load(a_log + head).to(tl.float32))
    if BOUND:
        decay = tl.exp(bound / (1.0 + tl.exp(-rate * step)))
    else:
        step = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(tl.minimum(step, 20.0))))
        decay = tl.exp(-rate * step)
    beta = max_beta / (1.0 + tl.exp(-tl.load(b + row * b_row + group * b_head + member).to(tl.float32)))

    if CHANNELS:
        decay = decay[:, None]
    state = state * decay
    change = (v - tl.sum(k[:, None] * state, 0)) * beta
    state += k[:, None] * change[None, :]
    tl.store(place, state, mask=ok)

    tl.store(read_out + (row * HEADS + head) * V_DIM + j, tl.sum(q[:, None] * state, 0), mask=v_ok)


@triton.jit
def _gated_norm(
    x, z, weight, out, z_row, z_head, eps,
    HEADS: tl.constexpr, GROUP: tl.constexpr, V_DIM: tl.constexpr, V_PAD: tl.constexpr, SIGMOID: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, head): norm x, rounded as in the model's own code, and gate it by z."""
    launch_dependents(PDL)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    j = tl.arange(0, V_PAD)
    v_ok = j < V_DIM
    kind = out.dtype.element_ty
    scale = tl.load(weight + j, mask=v_ok, other=0.0).to(tl.float32)
    grid_wait(PDL)
    read = tl.load(x + (row * HEADS + head) * V_DIM + j, mask=v_ok, other=0.0).to(kind).to(tl.float32)
    normed = read * tl.rsqrt(tl.sum(read * read, 0) / V_DIM + eps)
    if SIGMOID:
        normed *= scale
    else:
        normed = (scale * normed.to(kind).to(tl.float32)).to(kind).to(tl.float32)
    gate = tl.load(z + row * z_row + head // GROUP * z_head + head % GROUP * V_DIM + j, mask=v_ok, other=0.0).to(
        tl.float32
    )
    result = (normed if SIGMOID else normed * gate) / (1.0 + tl.exp(-gate))
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
    gates    b and a [num_rows, num_k_heads, group], z [num_rows, num_k_heads, group * v_dim]; last dimension dense;
             a [num_rows, num_heads, k_dim], dense within a row, where each channel of a key decays by itself
    states   float32 [num_slots, num_heads, k_dim, v_dim], dense within a slot, written
    slots    int64 [num_rows]
    epsilon  added to the squared length of q and k
    -> [num_rows, num_heads * v_dim], dtype of mixed
    """
    b, a, z = gates
    _, heads, k_dim, v_dim = states.shape
    read = torch.empty(len(mixed), heads * v_dim, dtype=torch.float32, device=mixed.device)
    group = heads // weights.num_k_heads
    _delta[(len(mixed), heads, triton.cdiv(v_dim, VALUES))](
        mixed, a, b, weights.a_log, weights.dt_bias, states, slots, read,
        mixed.stride(0), a.stride(0), a.stride(1), b.stride(0), b.stride(1), states.stride(0), k_dim**-0.5, epsilon,
        weights.max_beta, weights.bound or 0.0,
        HEADS=heads, GROUP=group, K_DIM=k_dim, V_DIM=v_dim,
        K_PAD=triton.next_power_of_2(k_dim), BLOCK=VALUES, CHANNELS=weights.dt_bias.numel() > heads,
        BOUND=weights.bound is not None, num_warps=4, **pdl_options(mixed),
    )  # fmt: skip
    return gated_norm(weights, read, z)


def gated_norm(weights: DeltaWeights, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """Norm each head of x [num_tokens, num_heads * v_dim], rounded to the dtype of z, and multiply it by z's gate.

    z  [num_tokens, num_k_heads, group * v_dim], last dimension dense
    -> [num_tokens, num_heads * v_dim], dtype of z
    """
    (v_dim,) = weights.norm_weight.shape
    heads = x.shape[1] // v_dim
    out = torch.empty(x.shape, dtype=z.dtype, device=x.device)
    _gated_norm[(len(x), heads)](
        x, z, weights.norm_weight, out, z.stride(0), z.stride(1), weights.eps,
        HEADS=heads, GROUP=heads // weights.num_k_heads, V_DIM=v_dim, V_PAD=triton.next_power_of_2(v_dim),
        SIGMOID=weights.sigmoid, num_warps=1, **pdl_options(x),
    )  # fmt: skip
    return out


SCANNED = 16
"""Rows of a state of the scan for one program."""


@triton.jit
def _scan(
    x, dt, b, c, a, states, slots, out, x_row, x_head, dt_row, b_row, b_group, c_row, c_group, slot_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, STATE: tl.constexpr, STATE_PAD: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, head, block of the head's numbers): reads and writes its part of the head's state once."""
    launch_dependents(PDL)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i, n = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, STATE_PAD)
    i_ok, n_ok = i < DIM, n < STATE
    ok = i_ok[:, None] & n_ok[None, :]
    place = states + tl.load(slots + row) * slot_stride + head * DIM * STATE + i[:, None] * STATE + n[None, :]
    grid_wait(PDL)
    state = tl.load(place, mask=ok, other=0.0)
    step = tl.load(dt + row * dt_row + head)
    value = tl.load(x + row * x_row + head * x_head + i, mask=i_ok, other=0.0).to(tl.float32)
    write = tl.load(b + row * b_row + head // GROUP * b_group + n, mask=n_ok, other=0.0).to(tl.float32)
    read = tl.load(c + row * c_row + head // GROUP * c_group + n, mask=n_ok, other=0.0).to(tl.float32)
    state = state * tl.exp(step * tl.load(a + head)) + (value * step)[:, None] * write[None, :]
    tl.store(place, state, mask=ok)
    tl.store(out + (row * HEADS + head) * DIM + i, tl.sum(state * read[None, :], 1), mask=i_ok)


def scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    a: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Run one token of each row through the selective scan (selective_scan.py), without its skip.

    x       [num_rows, num_heads, head_dim]; b, c [num_rows, num_groups, state_dim]; last dimensions dense
    dt      float32 [num_rows, num_heads], last dimension dense; a float32 [num_heads]
    states  float32 [num_slots, num_heads, head_dim, state_dim], dense within a slot, written
    slots   int64 [num_rows]
    -> float32 [num_rows, num_heads, head_dim]
    """
    num_rows, heads, dim = x.shape
    state_dim = states.shape[3]
    out = torch.empty(num_rows, heads, dim, dtype=torch.float32, device=x.device)
    _scan[(num_rows, heads, triton.cdiv(dim, SCANNED))](
        x, dt, b, c, a, states, slots, out, x.stride(0), x.stride(1), dt.stride(0), b.stride(0), b.stride(1),
        c.stride(0), c.stride(1), states.stride(0), HEADS=heads, GROUP=heads // b.shape[1], DIM=dim, STATE=state_dim,
        STATE_PAD=triton.next_power_of_2(state_dim), BLOCK=SCANNED, num_warps=4, **pdl_options(x),
    )  # fmt: skip
    return out
