"""Extend attention on a GPU: several new tokens per row over a cached prefix, a ragged batch in one launch.

The query heads of one KV head are further queries of it, so each token's K and V are read once per KV head. Tokens are
read in order, in blocks that start at multiples of the block. Blocks that all queries of a program see whole are read
by a loop without masks, which may round differently, unless the caller asks for uniform results.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from graftlm.kernels.triton_decode import Scales
from graftlm.kernels.triton_softmax import LOG2E, add_sink, attend_block, precision


# rows, lens and indptr begin anywhere in a step: compiled anew for where, a step would wait for seconds
@triton.jit(do_not_specialize=["window"], do_not_specialize_on_alignment=["rows", "lens", "indptr"])
def _extend(
    q, k, v, table, rows, lens, indptr, sinks, k_scale, v_scale, out, scale, softcap, window,
    q_token, q_head, k_slot, k_head, v_slot, v_head, table_row, out_token, out_head,
    GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, SCALED: tl.constexpr, UNIFORM: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (block of queries, KV head, row); the longest blocks first."""
    i, h, b = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin = tl.load(indptr + b)
    num_new = tl.load(indptr + b + 1) - begin
    if i * M < num_new * GROUP:
        length = tl.load(lens + b)
        past = length - num_new
        query = i * M + tl.arange(0, M)
        token = query // GROUP
        head = h * GROUP + query % GROUP
        t_ok = token < num_new
        d, e = tl.arange(0, D_PAD), tl.arange(0, E_PAD)
        d_ok, e_ok = d < D, e < E
        queries = tl.load(
            q + (begin + token)[:, None].to(tl.int64) * q_token + head[:, None] * q_head + d[None, :],
            mask=t_ok[:, None] & d_ok[None, :],
            other=0.0,
        )
        position = past + token
        m = tl.full([M], -1e30, tl.float32)
        total = tl.zeros([M], tl.float32)
        acc = tl.zeros([M, E_PAD], tl.float32)
        slots = table + tl.load(rows + b).to(tl.int64) * table_row
        k += h * k_head
        v += h * v_head
        if SCALED:
            scale *= tl.load(k_scale + h)
        first = 0
        if WINDOW:
            first = tl.maximum(past + i * M // GROUP - window + 1, 0) // N * N
        last = tl.minimum(length, past + ((i + 1) * M - 1) // GROUP + 1)
        middle = (past + i * M // GROUP + 1) // N * N  # every query sees all before it
        if WINDOW or UNIFORM:
            middle = first
        for n in range(first, middle, N):
            slot = tl.load(slots + n + tl.arange(0, N)).to(tl.int64)
            keys = tl.load(k + slot[:, None] * k_slot + d[None, :], mask=d_ok[None, :], other=0.0)
            values = tl.load(v + slot[:, None] * v_slot + e[None, :], mask=e_ok[None, :], other=0.0)
            m, total, acc = attend_block(
                queries, keys, values, True, m, total, acc, scale, softcap, False, SOFTCAP, PRECISION
            )
        for n in range(middle, last, N):
            column = n + tl.arange(0, N)
            in_range = column < last
            slot = tl.load(slots + column, mask=in_range, other=0).to(tl.int64)
            keys = tl.load(k + slot[:, None] * k_slot + d[None, :], mask=in_range[:, None] & d_ok[None, :], other=0.0)
            values = tl.load(v + slot[:, None] * v_slot + e[None, :], mask=in_range[:, None] & e_ok[None, :], other=0.0)
            ok = in_range[None, :] & (column[None, :] <= position[:, None])
            if WINDOW:
                ok = ok & (column[None, :] > position[:, None] - window)
            m, total, acc = attend_block(
                queries, keys, values, ok, m, total, acc, scale, softcap, True, SOFTCAP, PRECISION
            )
        if SCALED:
            acc *= tl.load(v_scale + h)
        if SINKS:
            m, total, acc = add_sink(sinks, head, t_ok, m, total, acc)
        joined = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(
            out + (begin + token)[:, None].to(tl.int64) * out_token + head[:, None] * out_head + e[None, :],
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


@dataclass(frozen=True)
class ExtendTile:
    """How the kernel is cut: queries of a program, tokens read at once, warps, and how many reads are under way."""

    queries: int
    block: int
    warps: int
    stages: int


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
    scales: Scales | None = None,
    tile: ExtendTile | None = None,
    uniform: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend each row's new tokens, causally, to all of the row's slots.

    q  [num_tokens, num_heads, k_dim], k [num_slots, num_kv_heads, k_dim], v [num_slots, num_kv_heads, v_dim]
    -> [num_tokens, num_heads, v_dim], dtype of q, written to `out` if given; softmax in float32.

    With `uniform` and one `tile`, a query's result is the same to the last bit in every batch and every chunk.
    """
    num_tokens, num_heads, k_dim = q.shape
    num_kv_heads, v_dim = v.shape[1], v.shape[2]
    group = num_heads // num_kv_heads
    if out is None:
        out = torch.empty(num_tokens, num_heads, v_dim, dtype=q.dtype, device=q.device)
    tile = tile or tile_of(q.dtype, max(k_dim, v_dim), step.max_new * group)
    blocks = triton.cdiv(step.max_new * group, tile.queries)
    _extend[(blocks, num_kv_heads, step.rows.shape[0])](
        q, k, v, step.table, step.rows, step.lens, step.indptr, sinks if sinks is not None else q,
        scales.k if scales is not None else q, scales.v if scales is not None else q, out,
        scale * LOG2E, (softcap or 1.0) * LOG2E, window or 0,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), step.table.stride(0),
        out.stride(0), out.stride(1),
        GROUP=group, D=k_dim, D_PAD=triton.next_power_of_2(k_dim),
        E=v_dim, E_PAD=triton.next_power_of_2(v_dim), M=tile.queries, N=tile.block,
        WINDOW=window is not None, SOFTCAP=softcap is not None, SINKS=sinks is not None, SCALED=scales is not None,
        UNIFORM=uniform, PRECISION=precision(q.dtype), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def tile_of(dtype: torch.dtype, head_dim: int, num_queries: int) -> ExtendTile:
    """The tile for heads of this size and rows with at most so many queries per KV head."""
    if dtype == torch.float32:
        return ExtendTile(32, 32, 4, 2)
    if head_dim > 128:
        return ExtendTile(64, 32, 4, 2)
    return ExtendTile(64, 64, 4, 3) if num_queries <= 512 else ExtendTile(256, 64, 8, 3)
