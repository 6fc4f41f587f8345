"""Attention in one order of sums: a query's result is the same to the last bit in every batch and every chunk.

Tokens are read in blocks of 32, and a softmax is taken over each piece of 64 tokens, from token 1,024 on of 256, all
counted from the sequence's first. The results of pieces are added up from the first to the last. So the pieces of a row
that decodes may be shared out among programs: with few rows each program has some of them, and the last one to end adds
all up, in the same order as a program does that has the whole row.

Every operation is rounded by itself, so that blocks which all queries see whole need no masks. Matrix units give a
query's row of a product the same bits in tiles of both sizes, those that decode and others, on the cards on which there
are two (`tile_of`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graftlm.kernels.attention_params import AttentionParams
from graftlm.kernels.gpu.attention.decode import Scales
from graftlm.kernels.gpu.attention.extend import LARGE_MANY_BYTES, ExtendRows, ExtendTile
from graftlm.kernels.gpu.attention.online_softmax import LOG2E, add_sink, attend_block, precision
from graftlm.kernels.gpu.attention.softmax_pieces import Room, Rooms, added, keep, piece_of, size_at, start_of
from graftlm.kernels.gpu.pdl import grid_wait, launch_dependents, pdl_options
from graftlm.kernels.gpu.support import card_of

BLOCK = 32
"""Tokens of a block."""

MAX_SPLITS = 32
_FEW_STAGES = 5  # of rows so few that a multiprocessor has one program or two: a short piece is read at once
_JOINED = 8  # pieces that are read at once when they are added up


@triton.jit
def _see(
    queries, k, v, slots, slot, first, end, last, position, until, window, state, pieces, scale, softcap,
    k_slot, v_slot, D: tl.constexpr, D_PAD: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr, N: tl.constexpr,
    PIECES: tl.constexpr, SPLIT: tl.constexpr, MASKED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Let queries at `position` [M] see tokens [first, end) of the table before `until` [M]; they begin with `slot`."""
    M: tl.constexpr = queries.shape[0]
    d, e = tl.arange(0, D_PAD), tl.arange(0, E_PAD)
    d_ok, e_ok = (d < D)[None, :], (e < E)[None, :]
    high, sum_all, all_acc, m, total, acc = state
    part_out, part_stats, place, q_ok, begin = pieces
    for n in range(first, end, N):
        if PIECES:  # noqa: SIM102, a constant
            if n % size_at(n) == 0:
                if SPLIT:
                    if n > begin:
                        keep(part_out, part_stats, place + piece_of(n) - 1, q_ok, m, total, acc, E, E_PAD)
                else:
                    high, sum_all, all_acc = added(high, sum_all, all_acc, m, total, acc)
                m = tl.full([M], -1e30, tl.float32)
                total = tl.zeros([M], tl.float32)
                acc = tl.zeros([M, E_PAD], tl.float32)
        column = n + tl.arange(0, N)
        ok = column < last
        k_ok, v_ok = d_ok, e_ok
        if MASKED:
            k_ok, v_ok = ok[:, None] & d_ok, ok[:, None] & e_ok
        here = slot.to(tl.int64)[:, None]
        keys = tl.load(k + here * k_slot + d[None, :], mask=k_ok, other=0.0)
        values = tl.load(v + here * v_slot + e[None, :], mask=v_ok, other=0.0)
        slot = tl.load(slots + column + N, mask=column + N < last, other=0)
        seen = ok[None, :] & (column[None, :] < until[:, None])
        if WINDOW:
            seen = seen & (column[None, :] > position[:, None] - window)
        m, total, acc = attend_block(
            queries, keys, values, seen, m, total, acc, scale, softcap, MASKED, SOFTCAP, PRECISION
        )
    return slot, (high, sum_all, all_acc, m, total, acc)


# rows, lens, indptr and until begin anywhere in a step: compiled anew for where, a step would wait for seconds
@triton.jit(
    do_not_specialize=["window", "most_pieces"], do_not_specialize_on_alignment=["rows", "lens", "indptr", "until"]
)
def _attend(
    q, k, v, table, rows, lens, indptr, sinks, k_scale, v_scale, out, part_out, part_stats, counters, until,
    scale, softcap, window, most_pieces,
    q_token, q_head, k_slot, k_head, v_slot, v_head, table_row, out_token, out_head,
    GROUP: tl.constexpr, GROUP_JOIN: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, E: tl.constexpr,
    E_PAD: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PIECES: tl.constexpr, SPLIT: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr,
    JOINED: tl.constexpr, PDL: tl.constexpr, UNTIL: tl.constexpr,
):  # fmt: skip
    """Program (KV head, block of queries or some of the pieces, row); the longest blocks first."""
    launch_dependents(PDL)
    h, b = tl.program_id(0), tl.program_id(2)
    num_heads = tl.num_programs(0) * GROUP
    begin = tl.load(indptr + b)
    num_new = tl.load(indptr + b + 1) - begin
    i = 0 if SPLIT else tl.num_programs(1) - 1 - tl.program_id(1)
    length = tl.load(lens + b)
    past = length - num_new
    query = i * M + tl.arange(0, M)
    token = query // GROUP
    head = h * GROUP + query % GROUP
    q_ok = token < num_new
    position = past + token
    low = past + i * M // GROUP  # what all queries see ends behind it
    last = tl.minimum(length, past + ((i + 1) * M - 1) // GROUP + 1)
    seen = position + 1
    if UNTIL:
        seen = tl.load(until + begin + token, mask=q_ok, other=0)
        last = tl.minimum(length, tl.max(seen))
    start = 0
    if WINDOW:
        start = tl.maximum(low - window + 1, 0)
        start = start_of(piece_of(start)) if PIECES else start // N * N
    end, used, first = last, 1, 0
    if SPLIT:
        first = piece_of(start)
        num_pieces = piece_of(last - 1) + 1 - first
        each = tl.cdiv(num_pieces, tl.num_programs(1))
        used = tl.cdiv(num_pieces, each)
        start = start_of(first + tl.program_id(1) * each)
        end = tl.minimum(start_of(first + (tl.program_id(1) + 1) * each), last)
    slots = table + tl.load(rows + b).to(tl.int64) * table_row
    column = start + tl.arange(0, N)
    slot = tl.load(slots + column, mask=column < end, other=0)
    grid_wait(PDL)
    if i * M < num_new * GROUP and tl.program_id(1) < (used if SPLIT else tl.num_programs(1)):
        d = tl.arange(0, D_PAD)
        queries = tl.load(
            q + (begin + token)[:, None].to(tl.int64) * q_token + head[:, None] * q_head + d[None, :],
            mask=q_ok[:, None] & (d < D)[None, :],
            other=0.0,
        )
        if SCALED:
            scale *= tl.load(k_scale + h)
        place = (b * num_heads + head).to(tl.int64) * most_pieces
        pieces = (part_out, part_stats, place, q_ok, start)
        nothing = tl.full([M], -1e30, tl.float32)
        zero = tl.zeros([M], tl.float32)
        zeros = tl.zeros([M, E_PAD], tl.float32)
        state = (nothing, zero, zeros, nothing, zero, zeros)
        middle = start
        if not WINDOW:
            middle = tl.maximum(tl.minimum((low + 1) // N * N, end), start)
            slot, state = _see(
                queries, k + h * k_head, v + h * v_head, slots, slot, start, middle, end, position, seen, window, state,
                pieces, scale, softcap, k_slot, v_slot,
                D, D_PAD, E, E_PAD, N, PIECES, SPLIT, False, WINDOW, SOFTCAP, PRECISION,
            )  # fmt: skip
        slot, state = _see(
            queries, k + h * k_head, v + h * v_head, slots, slot, middle, end, end, position, seen, window, state,
            pieces, scale, softcap, k_slot, v_slot,
            D, D_PAD, E, E_PAD, N, PIECES, SPLIT, True, WINDOW, SOFTCAP, PRECISION,
        )  # fmt: skip
        high, sum_all, all_acc, m, total, acc = state
        if SPLIT:
            keep(part_out, part_stats, place + piece_of(end - 1), q_ok, m, total, acc, E, E_PAD)
            counter = counters + b * tl.num_programs(0) + h
            tl.debug_barrier()  # all of this program's pieces are written before it counts as done
            if tl.atomic_add(counter, 1) == used - 1:
                tl.debug_barrier()
                tl.store(counter, 0)
                _join(
                    out + begin.to(tl.int64) * out_token, part_out, part_stats, b * num_heads, h, first,
                    piece_of(last - 1) + 1, most_pieces, sinks, v_scale, out_head,
                    GROUP, GROUP_JOIN, E, E_PAD, SINKS, SCALED, JOINED,
                )  # fmt: skip
        else:
            if PIECES:
                m, total, acc = added(high, sum_all, all_acc, m, total, acc)
            _finish(
                out + (begin + token)[:, None].to(tl.int64) * out_token + head[:, None] * out_head, head, q_ok, h,
                sinks, v_scale, m, total, acc, E, E_PAD, SINKS, SCALED,
            )  # fmt: skip


@triton.jit
def _join(
    out, part_out, part_stats, first_head, h, first, end, most_pieces, sinks, v_scale, out_head,
    GROUP: tl.constexpr, GROUP_JOIN: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr,
    SINKS: tl.constexpr, SCALED: tl.constexpr, JOINED: tl.constexpr,
):  # fmt: skip
    """Add up pieces [first, end) of the query heads of KV head `h`."""
    g, e = tl.arange(0, GROUP_JOIN), tl.arange(0, E_PAD)
    ok, head = g < GROUP, h * GROUP + g
    place = (first_head + head).to(tl.int64) * most_pieces
    high = tl.full([GROUP_JOIN], -1e30, tl.float32)
    total = tl.zeros([GROUP_JOIN], tl.float32)
    acc = tl.zeros([GROUP_JOIN, E_PAD], tl.float32)
    for piece in range(first, end, JOINED):
        for more in tl.static_range(JOINED):  # reads of all of them are under way together
            at = tl.full([GROUP_JOIN], piece + more, tl.int32)
            there, here = ok & (at < end), place + at
            # from the second-level cache: other multiprocessors wrote them during this launch
            m = tl.load(part_stats + here * 2, mask=there, other=-1e30, cache_modifier=".cg")
            t = tl.load(part_stats + here * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
            a = tl.load(
                part_out + here[:, None] * E + e[None, :],
                mask=there[:, None] & (e < E)[None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            high, total, acc = added(high, total, acc, m, t, a)
    _finish(out + head[:, None] * out_head, head, ok, h, sinks, v_scale, high, total, acc, E, E_PAD, SINKS, SCALED)


@triton.jit
def _finish(
    there, head, ok, h, sinks, v_scale, m, total, acc,
    E: tl.constexpr, E_PAD: tl.constexpr, SINKS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Store the weighted mean of the values at there [M, 1]."""
    e = tl.arange(0, E_PAD)
    if SCALED:
        acc *= tl.load(v_scale + h)
    if SINKS:
        m, total, acc = add_sink(sinks, head, ok, m, total, acc)
    joined = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(there + e[None, :], joined.to(there.dtype.element_ty), mask=ok[:, None] & (e < E)[None, :])


def tile_of(dtype: torch.dtype, head_dim: int, group: int, device: torch.device, *, decodes: bool) -> ExtendTile:
    """The tile for rows that decode, of one token, or for others. Blocks have 32 tokens in all of one dtype."""
    if head_dim > 256:
        if dtype == torch.float32:
            return ExtendTile(16, 16, 4, 1)
        roomy = card_of(device).shared_memory >= LARGE_MANY_BYTES
        return ExtendTile(64, BLOCK, 8, 2) if roomy else ExtendTile(16, BLOCK, 4, 1)
    if dtype == torch.float32:  # summed by threads, whose order depends on the tile
        return ExtendTile(32, BLOCK, 4, 2)
    if head_dim > 128:
        return ExtendTile(64, BLOCK, 4, 2)
    if decodes and not _one_tile(device):
        rows = max(16, triton.next_power_of_2(group))
        return ExtendTile(rows, BLOCK, rows // 16, 2)  # a warp for 16 queries: it has their scores whole
    return ExtendTile(64, BLOCK, 4, 3)


def _one_tile(device: torch.device) -> bool:
    """Whether it is not known that the instructions of small and of large tiles give the same bits."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] > 9


def has_pieces(head_dim: int) -> bool:
    """Whether there are pieces. The sums of two do not fit into registers for heads of more than 128 dimensions."""
    return head_dim <= 128


def num_splits(num_rows: int, num_kv_heads: int, num_sms: int, head_dim: int) -> int:
    """Programs that share the pieces of a row that decodes, where there are fewer than three for a multiprocessor.

    Then twice as many as that takes: pieces seldom come out even.
    """
    splits = 1
    while has_pieces(head_dim) and num_rows * num_kv_heads * splits < 3 * num_sms and splits < MAX_SPLITS:
        splits *= 2
    return min(2 * splits, MAX_SPLITS) if splits > 1 else 1


def one_order_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    step: ExtendRows,
    params: AttentionParams,
    *,
    room: Room | None = None,
    splits: int = 1,
    scales: Scales | None = None,
    tile: ExtendTile | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend each row's new tokens to the row's slots, causally but for `step.until`.

    q  [num_tokens, num_heads, k_dim], k [num_slots, num_kv_heads, k_dim], v [num_slots, num_kv_heads, v_dim]
    -> [num_tokens, num_heads, v_dim], dtype of q, written to `out` if given; softmax in float32.

    splits  programs that share the pieces of a row, for rows of one new token; more than one need `room`
    """
    num_tokens, num_heads, k_dim = q.shape
    num_kv_heads, v_dim = v.shape[1], v.shape[2]
    group, dim = num_heads // num_kv_heads, max(k_dim, v_dim)
    if out is None:
        out = torch.empty(num_tokens, num_heads, v_dim, dtype=q.dtype, device=q.device)
    if tile is None:
        tile = tile_of(q.dtype, dim, group, q.device, decodes=step.max_new == 1)
    assert splits == 1 or (room is not None and step.max_new == 1 and tile.queries >= group)
    few = 2 * splits > MAX_SPLITS and q.element_size() == 2
    blocks = splits if splits > 1 else triton.cdiv(step.max_new * group, tile.queries)
    _attend[(num_kv_heads, blocks, step.rows.shape[0])](
        q, k, v, step.table, step.rows, step.lens, step.indptr, params.sinks if params.sinks is not None else q,
        scales.k if scales is not None else q, scales.v if scales is not None else q, out,
        room.out if room is not None else q, room.stats if room is not None else q,
        room.counters if room is not None else q, step.until if step.until is not None else step.indptr,
        params.scale * LOG2E, (params.softcap or 1.0) * LOG2E, params.window or 0,
        room.most_pieces if room is not None else 0,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), step.table.stride(0),
        out.stride(0), out.stride(1),
        GROUP=group, GROUP_JOIN=triton.next_power_of_2(group), D=k_dim, D_PAD=triton.next_power_of_2(k_dim),
        E=v_dim, E_PAD=triton.next_power_of_2(v_dim), M=tile.queries, N=tile.block, PIECES=has_pieces(dim),
        SPLIT=splits > 1, WINDOW=params.window is not None, SOFTCAP=params.softcap is not None,
        SINKS=params.sinks is not None, SCALED=scales is not None, PRECISION=precision(q.dtype), JOINED=_JOINED,
        UNTIL=step.until is not None,
        num_warps=tile.warps, num_stages=_FEW_STAGES if few else tile.stages, enable_fp_fusion=False, **pdl_options(q),
    )  # fmt: skip
    return out


class OneOrder:
    """Attends through `one_order_attention`, and shares rows out where they are few."""

    def __init__(self, num_sms: int) -> None:
        self.num_sms = num_sms
        self._rooms = Rooms()

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        step: ExtendRows,
        params: AttentionParams,
        *,
        scales: Scales | None,
        out: torch.Tensor,
    ) -> None:
        """See `one_order_attention`. Rows of one token are shared out where they are few."""
        num_rows, num_heads, dim = len(step.rows), q.shape[1], max(k.shape[2], v.shape[2])
        group = num_heads // k.shape[1]
        tile = tile_of(q.dtype, dim, group, q.device, decodes=step.max_new == 1)
        shared = step.max_new == 1 and tile.queries >= group
        splits = num_splits(num_rows, k.shape[1], self.num_sms, dim) if shared else 1
        room = self._rooms.find(num_rows, num_heads, v.shape[2], step.table.shape[1], q.device) if splits > 1 else None
        splits = splits if room is not None else 1
        one_order_attention(q, k, v, step, params, room=room, splits=splits, scales=scales, tile=tile, out=out)
