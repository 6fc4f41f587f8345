"""Rows of several tokens of layers with a state: the causal convolution, and the gated delta rule in chunks.

The delta rule runs as two kernels. The first solves, for each chunk and head by itself, the triangular system that
relates a chunk's writes to the state before it; the second takes the state from chunk to chunk. Source: Gated DeltaNet,
arXiv 2412.06464, section 3.3; the torch form is kernels/recurrent/delta_rule.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graftlm.kernels.gpu.attention.online_softmax import precision
from graftlm.kernels.gpu.support import card_of
from graftlm.kernels.recurrent.delta_rule import EPSILON, DeltaInputs
from graftlm.kernels.recurrent.state_step import RaggedRows

VALUES = 32
"""Columns of a state for one program."""

SHARED_MEMORY = 160_000
"""Bytes of shared memory that chunks of 64 tokens with heads of 128 numbers need."""

MAX_DIM = 128
"""Numbers of a key, at most."""


def runs_prefill(device: torch.device, k_dim: int, v_dim: int) -> bool:
    """Return True if `device` has memory for heads of this size."""
    return max(k_dim, v_dim) <= MAX_DIM and card_of(device).shared_memory >= SHARED_MEMORY


@triton.jit(do_not_specialize=["num_tokens", "num_kept"])
def _convolve_rows(
    x, columns, kept, taps, weight, bias, out, x_row, weight_row, num_tokens, num_kept, channels,
    COLUMNS: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (block of tokens, block of channels)."""
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    t_ok, c_ok = t < num_tokens, c < channels
    ok = t_ok[:, None] & c_ok[None, :]
    column = tl.load(columns + c, mask=c_ok, other=0) if COLUMNS else c
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for tap in tl.static_range(TAPS):
        place = tl.load(taps + t * TAPS + tap, mask=t_ok, other=0)
        is_new = (place >= num_kept)[:, None]
        new = tl.load(x + (place - num_kept)[:, None] * x_row + column[None, :], mask=ok & is_new, other=0.0)
        old = tl.load(kept + place[:, None] * channels + c[None, :], mask=ok & ~is_new, other=0.0)
        factor = tl.load(weight + c * weight_row + tap, mask=c_ok, other=0.0).to(tl.float32)
        total += tl.where(is_new, new, old).to(tl.float32) * factor[None, :]
    if BIAS:
        total += tl.load(bias + c, mask=c_ok, other=0.0).to(tl.float32)[None, :]
    kind = out.dtype.element_ty
    if SILU:
        total = total.to(kind).to(tl.float32)
        total = total / (1.0 + tl.exp(-total))
    tl.store(out + t[:, None] * channels + c[None, :], total.to(kind), mask=ok)


def convolve_rows(
    x: torch.Tensor,
    cached: torch.Tensor,
    rows: RaggedRows,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    silu: bool,
    columns: torch.Tensor | None = None,
) -> torch.Tensor:
    """Convolve the rows' new tokens with each row's cached inputs before them, and cache the last ones.

    x       [num_tokens, num_channels], last dimension dense; more channels, in any order, where `columns` names them
    cached  [num_slots, num_channels, kernel_size - 1], written
    weight  [num_channels, kernel_size], last dimension dense
    columns  int64 [num_channels]: where x has each channel
    -> [num_tokens, num_channels], dtype of x
    """
    taps, channels = rows.taps(weight.shape[1]), cached.shape[1]
    kept = cached.index_select(0, rows.slots).transpose(1, 2).reshape(-1, channels).contiguous()
    fresh = x.index_select(0, (taps.last.flatten() - len(kept)).clamp_(min=0))
    fresh = fresh if columns is None else fresh.index_select(1, columns)
    old = kept.index_select(0, taps.last.flatten().clamp(max=len(kept) - 1))
    last = torch.where((taps.last.flatten() < len(kept))[:, None], old, fresh).view(*taps.last.shape, channels)
    cached.index_copy_(0, rows.slots, last.transpose(1, 2))
    out = torch.empty(len(x), channels, dtype=x.dtype, device=x.device)
    tokens, block = 8, 256
    _convolve_rows[(triton.cdiv(len(x), tokens), triton.cdiv(channels, block))](
        x, columns if columns is not None else taps.inputs, kept, taps.inputs, weight, bias if bias is not None else x,
        out, x.stride(0), weight.stride(0), len(x), len(kept), channels,
        COLUMNS=columns is not None, BIAS=bias is not None, SILU=silu, TAPS=weight.shape[1], ROWS=tokens, BLOCK=block,
        num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _unit_rows(x, token, row_stride, first, ok, epsilon, DIM: tl.constexpr, PAD: tl.constexpr):
    """Numbers [SIZE, PAD] of a head of some tokens, scaled to length 1, in float32."""
    d = tl.arange(0, PAD)
    found = tl.load(
        x + token[:, None] * row_stride + first + d[None, :], mask=ok[:, None] & (d < DIM)[None, :], other=0.0
    )
    found = found.to(tl.float32)
    return found * tl.rsqrt(tl.sum(found * found, 1) + epsilon)[:, None]


@triton.jit(do_not_specialize=["num_tokens"])
def _solve_chunks(
    k, v, decay, beta, tokens, new, read, k_row, k_head, v_row, v_head, num_tokens, epsilon,
    HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    K_PAD: tl.constexpr, V_PAD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (chunk, head): (I + A) [new, read] = [beta v, beta k decay], by forward substitution."""
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i, d, e = tl.arange(0, SIZE), tl.arange(0, K_PAD), tl.arange(0, V_PAD)
    token = tl.load(tokens + chunk * SIZE + i)
    ok = token < num_tokens
    keys = _unit_rows(k, token, k_row, head // GROUP * k_head, ok, epsilon, K_DIM, K_PAD)
    rate = tl.load(beta + token * HEADS + head, mask=ok, other=0.0)
    grown = tl.cumsum(tl.load(decay + token * HEADS + head, mask=ok, other=0.0), 0)
    between = tl.where(i[:, None] > i[None, :], tl.exp(grown[:, None] - grown[None, :]), 0.0)
    system = tl.dot(keys * rate[:, None], tl.trans(keys), input_precision=PRECISION) * between
    inverse = -system
    for r in range(1, SIZE):
        row = tl.sum(tl.where(i[:, None] == r, inverse, 0.0), 0)
        row += tl.sum(row[:, None] * inverse, 0)
        inverse = tl.where(i[:, None] == r, row[None, :], inverse)
    inverse += tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    place = (chunk * HEADS + head) * SIZE + i[:, None]
    v_ok = (e < V_DIM)[None, :]
    values = tl.load(v + token[:, None] * v_row + head * v_head + e[None, :], mask=ok[:, None] & v_ok, other=0.0)
    values = tl.dot(inverse, values.to(tl.float32) * rate[:, None], input_precision=PRECISION)
    tl.store(new + place * V_DIM + e[None, :], values, mask=v_ok)
    keys = tl.dot(inverse, keys * (rate * tl.exp(grown))[:, None], input_precision=PRECISION)
    tl.store(read + place * K_DIM + d[None, :], keys, mask=(d < K_DIM)[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def _scan_chunks(
    q, k, decay, tokens, firsts, counts, new, read, states, slots, out,
    q_row, q_head, k_row, k_head, slot_stride, num_tokens, scale, epsilon,
    HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    K_PAD: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (row, head, block of values): its part of the head's state, from the row's first chunk to the last."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i, d, j = tl.arange(0, SIZE), tl.arange(0, K_PAD), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    d_ok, v_ok = d < K_DIM, (j < V_DIM)[None, :]
    place = states + tl.load(slots + row) * slot_stride + head * K_DIM * V_DIM + d[:, None] * V_DIM + j[None, :]
    state = tl.load(place, mask=d_ok[:, None] & v_ok, other=0.0)
    for number in range(0, tl.load(counts + row)):
        chunk = tl.load(firsts + number) + row
        token = tl.load(tokens + chunk * SIZE + i)
        ok = token < num_tokens
        grown = tl.cumsum(tl.load(decay + token * HEADS + head, mask=ok, other=0.0), 0)
        whole = tl.sum(tl.where(i == SIZE - 1, grown, 0.0), 0)
        keys = _unit_rows(k, token, k_row, head // GROUP * k_head, ok, epsilon, K_DIM, K_PAD)
        queries = _unit_rows(q, token, q_row, head // GROUP * q_head, ok, epsilon, K_DIM, K_PAD) * scale
        solved = (chunk * HEADS + head) * SIZE + i[:, None]
        held = tl.load(read + solved * K_DIM + d[None, :], mask=d_ok[None, :], other=0.0)
        written = tl.load(new + solved * V_DIM + j[None, :], mask=v_ok, other=0.0)
        written -= tl.dot(held, state, input_precision=PRECISION)
        between = tl.where(i[:, None] >= i[None, :], tl.exp(grown[:, None] - grown[None, :]), 0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * between
        found = tl.dot(queries * tl.exp(grown)[:, None], state, input_precision=PRECISION)
        found += tl.dot(scores, written, input_precision=PRECISION)
        target = out + (token[:, None] * HEADS + head) * V_DIM + j[None, :]
        tl.store(target, found.to(out.dtype.element_ty), mask=ok[:, None] & v_ok)
        keys *= tl.exp(whole - grown)[:, None]
        state = state * tl.exp(whole) + tl.dot(tl.trans(keys), written, input_precision=PRECISION)
    tl.store(place, state, mask=d_ok[:, None] & v_ok)


def delta_chunks(inputs: DeltaInputs, states: torch.Tensor, rows: RaggedRows) -> torch.Tensor:
    """Run rows of several tokens through the gated delta rule, chunk by chunk, and store each row's last state.

    inputs  q, k and v as projected, last dimension dense; decay and beta dense
    states  float32 [num_slots, num_heads, k_dim, v_dim], dense within a slot, written
    -> [num_tokens, num_heads, v_dim], dtype of v
    """
    q, k, v, decay, beta = inputs
    chunks, (num_tokens, heads, v_dim), k_dim = rows.chunks, v.shape, k.shape[2]
    num_chunks, size = chunks.tokens.shape
    new = torch.empty(num_chunks, heads, size, v_dim, dtype=torch.float32, device=v.device)
    read = torch.empty(num_chunks, heads, size, k_dim, dtype=torch.float32, device=v.device)
    out = torch.empty(num_tokens, heads, v_dim, dtype=v.dtype, device=v.device)
    dims = {"K_DIM": k_dim, "V_DIM": v_dim, "K_PAD": max(triton.next_power_of_2(k_dim), 16)}
    options = {"HEADS": heads, "GROUP": heads // k.shape[1], "SIZE": size, "PRECISION": precision(v.dtype), **dims}
    _solve_chunks[(num_chunks, heads)](
        k, v, decay, beta, chunks.tokens, new, read, k.stride(0), k.stride(1), v.stride(0), v.stride(1), num_tokens,
        EPSILON, V_PAD=max(triton.next_power_of_2(v_dim), 16), num_warps=4, num_stages=1, **options,
    )  # fmt: skip
    _scan_chunks[(len(rows.slots), heads, triton.cdiv(v_dim, VALUES))](
        q, k, decay, chunks.tokens, chunks.firsts, chunks.counts, new, read, states, rows.slots, out,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), states.stride(0), num_tokens, k_dim**-0.5, EPSILON,
        BLOCK=VALUES, num_warps=4, num_stages=1, **options,
    )  # fmt: skip
    return out
