"""Extend attention on a GPU: several new tokens per row over a cached prefix, a ragged batch in one launch.

The query heads of one KV head are further queries of it, so each token's K and V are read once per KV head. Tokens are
read in order, in blocks that start at multiples of the block. Blocks that all queries of a program see whole are read
by a loop without masks, which may round differently.

Of a compact store only tokens from before the step are read; the new ones are read from the step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from graftlm.kernels.attention_params import AttentionParams
from graftlm.kernels.bits12.kv_read import SCALE, attend_records, slots_of
from graftlm.kernels.gpu.attention.decode import Scales
from graftlm.kernels.gpu.attention.online_softmax import LOG2E, add_sink, attend_block, precision
from graftlm.kernels.gpu.support import card_of


@triton.jit
def _see_masked(
    queries, k, v, slots, first, end, last, position, seen, window, m, total, acc, scale, softcap, k_step, v_step,
    D: tl.constexpr, D_PAD: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr, N: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, COMPACT: tl.constexpr,
):  # fmt: skip
    """Let queries at `position` [M] see what they may of tokens [first, end): those before `seen` [M] and `last`."""
    d, e = tl.arange(0, D_PAD), tl.arange(0, E_PAD)
    for n in range(first, end, N):
        column = n + tl.arange(0, N)
        in_range = column < last
        slot = (column if COMPACT else tl.load(slots + column, mask=in_range, other=0)).to(tl.int64)
        keys = tl.load(k + slot[:, None] * k_step + d[None, :], mask=in_range[:, None] & (d < D)[None, :], other=0.0)
        values = tl.load(v + slot[:, None] * v_step + e[None, :], mask=in_range[:, None] & (e < E)[None, :], other=0.0)
        ok = in_range[None, :] & (column[None, :] < seen[:, None])
        if WINDOW:
            ok = ok & (column[None, :] > position[:, None] - window)
        m, total, acc = attend_block(queries, keys, values, ok, m, total, acc, scale, softcap, True, SOFTCAP, PRECISION)
    return m, total, acc


# rows, lens, indptr and until begin anywhere in a step: compiled anew for where, a step would wait for seconds
@triton.jit(
    do_not_specialize=["window", "exponents_head"], do_not_specialize_on_alignment=["rows", "lens", "indptr", "until"]
)
def _extend(
    q, k, v, table, rows, lens, indptr, sinks, k_scale, v_scale, out, scale, softcap, window,
    q_token, q_head, k_slot, k_head, v_slot, v_head, table_row, out_token, out_head,
    exponents, k_new, v_new, until, exponents_head, k_token, k_new_head, v_token, v_new_head,
    GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, SCALED: tl.constexpr,
    PRECISION: tl.constexpr, COMPACT: tl.constexpr, CACHED: tl.constexpr, ASM: tl.constexpr,
    UNTIL: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Program (block of queries, part of V's dimensions and KV head, row); the longest blocks first."""
    i, h, b = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1) // PARTS, tl.program_id(2)
    v += tl.program_id(1) % PARTS * E
    out += tl.program_id(1) % PARTS * E
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
        seen = position + 1
        if UNTIL:
            seen = tl.load(until + begin + token, mask=t_ok, other=0)
        m = tl.full([M], -1e30, tl.float32)
        total = tl.zeros([M], tl.float32)
        acc = tl.zeros([M, E_PAD], tl.float32)
        slots = table + tl.load(rows + b).to(tl.int64) * table_row
        if SCALED:
            scale *= tl.load(k_scale + h)
        if COMPACT:
            if CACHED:
                first = 0
                if WINDOW:
                    first = tl.maximum(past + i * M // GROUP - window + 1, 0) // N * N
                middle = past // N * N
                k += h * k_head
                v += h * v_head
                exponents += h.to(tl.int64) * exponents_head
                # no branch around this: behind one ptxas would let the matrix units take one instruction at a time
                for part in tl.static_range(2):
                    start = tl.maximum(first, middle) if part else first
                    end = past if part else middle
                    m, total, acc = attend_records(
                        queries, k, v, exponents, slots, slots_of(slots, start, end, N), start, end, position, window,
                        m, total, acc, scale * SCALE, softcap, k_slot, v_slot,
                        N, WINDOW or part == 1, WINDOW, SOFTCAP, PRECISION, 1 if part else None, ASM,
                    )  # fmt: skip
                acc *= SCALE
            # from here on only the new tokens are seen, which lie one after the other
            k_all, k_step = k_new + begin.to(tl.int64) * k_token + h * k_new_head, k_token
            v_all, v_step = v_new + begin.to(tl.int64) * v_token + h * v_new_head, v_token
            length, past, position, seen = num_new, 0, token, seen - past
        else:
            k_all, k_step = k + h * k_head, k_slot
            v_all, v_step = v + h * v_head, v_slot
        first = 0
        last_token = past + ((i + 1) * M - 1) // GROUP
        last = tl.minimum(length, tl.max(seen) if UNTIL else last_token + 1)
        middle = (past + i * M // GROUP + 1) // N * N  # every query sees all before it, in so far as the window has it
        if WINDOW:
            first = tl.maximum(past + i * M // GROUP - window + 1, 0) // N * N
            low = tl.minimum(tl.cdiv(tl.maximum(last_token - window + 1, 0), N) * N, last)
            m, total, acc = _see_masked(
                queries, k_all, v_all, slots, first, low, last, position, seen, window, m, total, acc, scale, softcap,
                k_step, v_step, D, D_PAD, E, E_PAD, N, WINDOW, SOFTCAP, PRECISION, COMPACT,
            )  # fmt: skip
            first = low
            middle = tl.maximum(middle, first)
        for n in range(first, middle, N):
            slot = (n + tl.arange(0, N) if COMPACT else tl.load(slots + n + tl.arange(0, N))).to(tl.int64)
            keys = tl.load(k_all + slot[:, None] * k_step + d[None, :], mask=d_ok[None, :], other=0.0)
            values = tl.load(v_all + slot[:, None] * v_step + e[None, :], mask=e_ok[None, :], other=0.0)
            m, total, acc = attend_block(
                queries, keys, values, True, m, total, acc, scale, softcap, False, SOFTCAP, PRECISION
            )
        m, total, acc = _see_masked(
            queries, k_all, v_all, slots, middle, last, last, position, seen, window, m, total, acc, scale, softcap,
            k_step, v_step, D, D_PAD, E, E_PAD, N, WINDOW, SOFTCAP, PRECISION, COMPACT,
        )  # fmt: skip
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


MANY_ROWS = 8
"""Rows from which on large tiles still give enough programs."""


@dataclass(frozen=True)
class ExtendRows:
    """The rows of a mixed step, all on the device but for `max_new`.

    table    int32 [num_table_rows, max_len]  the slots of a sequence's tokens
    rows     int32 [num_rows]                 which table row each sequence has
    lens     int32 [num_rows]                 its tokens, the new ones included
    indptr   int32 [num_rows + 1]             where its new tokens are among the step's
    max_new  the most new tokens of a row
    until    int32 [num_tokens]  the tokens of its sequence that each new token of the step sees, at least those up to
                                 itself; None: those up to itself
    """

    table: torch.Tensor
    rows: torch.Tensor
    lens: torch.Tensor
    indptr: torch.Tensor
    max_new: int
    until: torch.Tensor | None = None


@dataclass(frozen=True)
class CompactRows:
    """What a compact store does not say alone: exponents, and the step's own K and V, which are not read from it.

    exponents  uint8 [num_kv_heads, num_slots, 2]
    k, v       bfloat16 [num_tokens, num_kv_heads, k_dim], last dimension dense
    cached     whether any row has tokens from before the step
    """

    exponents: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cached: bool = True


@dataclass(frozen=True)
class ExtendTile:
    """How the kernel is cut: queries of a program, tokens read at once, warps, and how many reads are under way.

    parts  of V's dimensions, each computed by a program of its own, which computes all scores; 1 for a compact store
    """

    queries: int
    block: int
    warps: int
    stages: int
    parts: int = 1


def extend_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    step: ExtendRows,
    params: AttentionParams,
    *,
    scales: Scales | None = None,
    tile: ExtendTile | None = None,
    compact: CompactRows | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend each row's new tokens to the row's slots, causally but for `step.until`.

    q  [num_tokens, num_heads, k_dim], k [num_slots, num_kv_heads, k_dim], v [num_slots, num_kv_heads, v_dim]
    -> [num_tokens, num_heads, v_dim], dtype of q, written to `out` if given; softmax in float32.

    With `compact`, k and v are a compact store's, int32 [num_slots, num_kv_heads, words] (kv_codec.py), and what is in
    the slots of new tokens does not matter.
    """
    num_tokens, num_heads, k_dim = q.shape
    num_kv_heads, v_dim = v.shape[1], v.shape[2]
    exponents, k_new, v_new = q, k, v
    if compact is not None:
        assert scales is None
        exponents, k_new, v_new = compact.exponents.view(torch.int16), compact.k, compact.v
        k, v, v_dim = k.view(torch.uint8), v.view(torch.uint8), v_new.shape[2]
    group = num_heads // num_kv_heads
    if out is None:
        out = torch.empty(num_tokens, num_heads, v_dim, dtype=q.dtype, device=q.device)
    unpacking_rows = step.rows.shape[0] if compact is not None and compact.cached else 0
    if tile is None:
        tile = tile_of(q.dtype, max(k_dim, v_dim), step.max_new * group, unpacking_rows=unpacking_rows)
        many = step.max_new * group > LARGE.queries
        roomy = card_of(q.device).shared_memory >= LARGE_MANY_BYTES
        if tile == LARGE and many and roomy:
            tile = LARGE_MANY if compact is None else LARGE_COMPACT
        elif tile == HUGE and roomy:
            tile = HUGE_HOPPER if step.max_new * group > FEW_QUERIES else HUGE_FEW
    blocks = triton.cdiv(step.max_new * group, tile.queries)
    part = v_dim // tile.parts
    _extend[(blocks, num_kv_heads * tile.parts, step.rows.shape[0])](
        q, k, v, step.table, step.rows, step.lens, step.indptr, params.sinks if params.sinks is not None else q,
        scales.k if scales is not None else q, scales.v if scales is not None else q, out,
        params.scale * LOG2E, (params.softcap or 1.0) * LOG2E, params.window or 0,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), step.table.stride(0),
        out.stride(0), out.stride(1),
        exponents, k_new, v_new, step.until if step.until is not None else step.indptr, exponents.stride(0),
        k_new.stride(0), k_new.stride(1), v_new.stride(0), v_new.stride(1),
        GROUP=group, D=k_dim, D_PAD=triton.next_power_of_2(k_dim),
        E=part, E_PAD=triton.next_power_of_2(part), M=tile.queries, N=tile.block,
        WINDOW=params.window is not None, SOFTCAP=params.softcap is not None, SINKS=params.sinks is not None,
        SCALED=scales is not None, PRECISION=precision(q.dtype), COMPACT=compact is not None,
        CACHED=compact is not None and compact.cached, ASM=q.is_cuda, UNTIL=step.until is not None, PARTS=tile.parts,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


LARGE, LARGE_MANY = ExtendTile(64, 32, 4, 2), ExtendTile(128, 64, 8, 3)
"""Tiles of heads of more than 128 dimensions, the second for more queries than the first has: 16 rows of 512 tokens, 8
heads of 256 over 4 KV heads, take 96 instead of 128 us on an H200."""

LARGE_COMPACT = ExtendTile(128, 64, 8, 2)
"""LARGE_MANY with a compact store, where queries and the step's own K and V lie in shared memory."""

HUGE, HUGE_FLOAT32 = ExtendTile(32, 16, 4, 2), ExtendTile(16, 16, 4, 1)
"""Tiles of heads of more than 256 dimensions, of 16 and of 32 bits."""

HUGE_HOPPER, HUGE_FEW = ExtendTile(128, 64, 8, 1, parts=2), ExtendTile(32, 32, 4, 2)
"""HUGE where a card has LARGE_MANY_BYTES; the second for at most FEW_QUERIES. In two parts each program computes all
scores and half of the output: 230 instead of 147 TFLOP/s on an H200, 512 tokens after 4,096 with 32 heads over 4."""

FEW_QUERIES = 64
"""Queries per KV head."""

LARGE_MANY_BYTES = 225 << 10
"""Shared memory that a card must have for LARGE_MANY."""


def tile_of(dtype: torch.dtype, head_dim: int, num_queries: int, *, unpacking_rows: int = 0) -> ExtendTile:
    """The tile for heads of this size and rows with at most so many queries per KV head.

    unpacking_rows  rows in all, if cached tokens are unpacked from 12 bits, which every tile of queries does anew;
                    0 if nothing is
    """
    if head_dim > 256:
        return HUGE if dtype.itemsize == 2 else HUGE_FLOAT32
    if dtype == torch.float32:
        return ExtendTile(32, 32, 4, 2)
    if head_dim > 128:
        return LARGE
    if num_queries > 512 or (num_queries > 128 and unpacking_rows >= MANY_ROWS):
        return ExtendTile(256, 64, 8, 3)
    return ExtendTile(64, 64, 4, 2 if unpacking_rows else 3)
