"""Extend attention on a GPU: several new tokens per row over a cached prefix, a ragged batch in one launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from graftlm.kernels.triton_decode import _attend_block


@triton.jit
def _extend(
    q, k, v, table, rows, lens, indptr, sinks, out, scale, softcap, window,
    q_token, q_head, k_slot, k_head, v_slot, v_head, table_row, out_token, out_head,
    GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (block of queries, head, row)."""
    i, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin = tl.load(indptr + b)
    num_new = tl.load(indptr + b + 1) - begin
    if i * M < num_new:
        length = tl.load(lens + b)
        past = length - num_new
        token = i * M + tl.arange(0, M)
        t_ok = token < num_new
        d, e = tl.arange(0, D_PAD), tl.arange(0, E_PAD)
        d_ok, e_ok = d < D, e < E
        queries = tl.load(
            q + (begin + token)[:, None] * q_token + h * q_head + d[None, :],
            mask=t_ok[:, None] & d_ok[None, :],
            other=0.0,
        )
        position = past + token
        m = tl.full([M], -1e30, tl.float32)
        total = tl.zeros([M], tl.float32)
        acc = tl.zeros([M, E_PAD], tl.float32)
        first = 0
        if WINDOW:
            first = tl.maximum(past + i * M - window + 1, 0) // N * N
        last = tl.minimum(length, past + (i + 1) * M)
        slots = table + tl.load(rows + b).to(tl.int64) * table_row
        kv_head = h // GROUP
        for n in range(first, last, N):
            column = n + tl.arange(0, N)
            in_range = column < last
            slot = tl.load(slots + column, mask=in_range, other=0).to(tl.int64)
            keys = tl.load(
                k + slot[:, None] * k_slot + kv_head * k_head + d[None, :],
                mask=in_range[:, None] & d_ok[None, :],
                other=0.0,
            )
            values = tl.load(
                v + slot[:, None] * v_slot + kv_head * v_head + e[None, :],
                mask=in_range[:, None] & e_ok[None, :],
                other=0.0,
            )
            ok = in_range[None, :] & (column[None, :] <= position[:, None])
            if WINDOW:
                ok = ok & (column[None, :] > position[:, None] - window)
            m, total, acc = _attend_block(queries, keys, values, ok, m, total, acc, scale, softcap, SOFTCAP, PRECISION)
        if SINKS:
            sink = tl.load(sinks + h).to(tl.float32)
            high = tl.maximum(m, sink)
            acc = acc * tl.exp(m - high)[:, None]
            total = total * tl.exp(m - high) + tl.exp(sink - high)
        joined = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(
            out + (begin + token)[:, None] * out_token + h * out_head + e[None, :],
            joined.to(out.dtype.element_ty),
            mask=t_ok[:, None] & e_ok[None, :],
        )


@dataclass(frozen=True)
class ExtendRows:
    """The rows of a mixed step, all on the device but for `max_new`.

    table    int32 [num_table_rows, max_len]  the slots of a sequence's tokens
    rows     int32 [num_rows]                 which table row each sequence has
    lens     int32 [num_rows]                 its tokens, the new ones included
    indptr   int32 [num_rows + 1]             where its new tokens are among the step's
    max_new  the most new tokens of a row
    """

    table: torch.Tensor
    rows: torch.Tensor
    lens: torch.Tensor
    indptr: torch.Tensor
    max_new: int


def extend_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    step: ExtendRows,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend each row's new tokens, causally, to all of the row's slots.

    q  [num_tokens, num_heads, k_dim], k [num_slots, num_kv_heads, k_dim], v [num_slots, num_kv_heads, v_dim]
    -> [num_tokens, num_heads, v_dim], dtype of q; softmax in float32.
    """
    num_tokens, num_heads, k_dim = q.shape
    num_kv_heads, v_dim = v.shape[1], v.shape[2]
    out = torch.empty(num_tokens, num_heads, v_dim, dtype=q.dtype, device=q.device)
    wide = q.dtype == torch.float32 or max(k_dim, v_dim) > 128
    m, n = (32, 32) if wide else (128, 64)
    _extend[(triton.cdiv(step.max_new, m), num_heads, step.rows.shape[0])](
        q, k, v, step.table, step.rows, step.lens, step.indptr, sinks if sinks is not None else q, out,
        scale, softcap or 1.0, window or 0,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), step.table.stride(0),
        out.stride(0), out.stride(1),
        GROUP=num_heads // num_kv_heads, D=k_dim, D_PAD=triton.next_power_of_2(k_dim),
        E=v_dim, E_PAD=triton.next_power_of_2(v_dim), M=m, N=n,
        WINDOW=window is not None, SOFTCAP=softcap is not None, SINKS=sinks is not None,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_warps=4 if wide else 8, num_stages=3,
    )  # fmt: skip
    return out
