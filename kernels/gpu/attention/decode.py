"""Decode attention on a GPU: one query per row, the KV of each row read through a table of slots.

Lengths and tables are read on the device and the grid does not depend on them, so a captured CUDA graph serves every
later step as it is. A row's tokens are cut into parts (split_kv.py) that run side by side; the last one to end
joins them. Source: flash decoding; the paged table after vLLM, arXiv 2309.06180.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from graftlm.kernels.attention_params import AttentionParams
from graftlm.kernels.bits12.kv_read import slots_of
from graftlm.kernels.gpu.attention.online_softmax import LOG2E, add_sink, attend_block, precision
from graftlm.kernels.gpu.attention.split_kv import MAX_SPLITS, PARTS, Parts, uniform_parts
from graftlm.kernels.gpu.pdl import grid_wait, launch_dependents, pdl_options
from graftlm.kernels.gpu.support import card_of

JOINED = 64  # parts of all heads of a group that are weighed at once when they are joined

ANYWHERE = ["rows", "lens", "starts", "items", "counts"]
"""Parameters that lie anywhere in a step's buffers. One kernel takes every alignment, so none compiles late."""


@triton.jit
def see(
    q, k, v, slots, slot, first, last, m, total, acc, scale, softcap, k_slot, v_slot,
    D: tl.constexpr, D_PAD: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr, BLOCK: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Let queries q [M, D_PAD] see tokens [first, last) of the table, which begin with `slot` [BLOCK].

    k and v point at their head. Slots are read a block ahead, so that K and V never wait for them.
    """
    d, e = tl.arange(0, D_PAD), tl.arange(0, E_PAD)
    d_ok, e_ok = d < D, e < E
    for position in range(first, last, BLOCK):
        n = position + tl.arange(0, BLOCK)
        ok = n < last
        here = slot.to(tl.int64)[:, None]
        keys = tl.load(k + here * k_slot + d[None, :], mask=ok[:, None] & d_ok[None, :], other=0.0)
        values = tl.load(v + here * v_slot + e[None, :], mask=ok[:, None] & e_ok[None, :], other=0.0)
        slot = slots_of(slots, position + BLOCK, last, BLOCK)
        m, total, acc = attend_block(
            q, keys, values, ok[None, :], m, total, acc, scale, softcap, True, SOFTCAP, PRECISION
        )
    return m, total, acc


_PARTS = tl.constexpr(PARTS)


@triton.jit
def store_partial(out, lse, row, head_ok, e, e_ok, m, total, acc, E: tl.constexpr):
    has = total > 0
    safe = tl.where(has, total, 1.0)
    tl.store(out + row[:, None] * E + e[None, :], acc / safe[:, None], mask=head_ok[:, None] & e_ok[None, :])
    tl.store(lse + row, tl.where(has, m + tl.log2(safe), -1e30), mask=head_ok)


@triton.jit(do_not_specialize=["num_prefix", "num_parts", "window"], do_not_specialize_on_alignment=ANYWHERE)
def _decode(
    q, k, v, table, rows, lens, starts, items, counts, part_out, part_lse, counters, sinks, k_scale, v_scale, out,
    scale, softcap, window, q_row, q_head, k_slot, k_head, v_slot, v_head, table_row, out_row, out_head,
    num_prefix, num_parts,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, GROUP_JOIN: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    E: tl.constexpr, E_PAD: tl.constexpr, BLOCK: tl.constexpr, JOINED: tl.constexpr, SPLIT: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (KV head, item): tokens [first, last) of a row's part of the table.

    Programs of one row, whose K and V lie side by side, run side by side. Where the tokens lie is read early.
    """
    launch_dependents(PDL)
    h, item = tl.program_id(0), tl.load(items + tl.program_id(1))
    b, s = item // _PARTS, item % _PARTS
    length = tl.load(lens + b)
    covered = tl.load(starts + b)
    slots = table + tl.load(rows + b).to(tl.int64) * table_row
    start = covered
    if WINDOW:
        start = tl.maximum(start, length - window)
    per_split = tl.maximum(tl.cdiv(tl.cdiv(length - start, tl.load(counts + b)), BLOCK), 1) * BLOCK
    used = tl.maximum(tl.cdiv(length - start, per_split), 1)  # parts that have tokens; one at least
    first = start + s * per_split
    last = tl.minimum(first + per_split, length)
    slot = slots_of(slots, first, last, BLOCK)
    grid_wait(PDL)
    if s < used:
        g, d, e = tl.arange(0, GROUP_PAD), tl.arange(0, D_PAD), tl.arange(0, E_PAD)
        g_ok, e_ok = g < GROUP, e < E
        head = h * GROUP + g
        queries = tl.load(
            q + b * q_row + head[:, None] * q_head + d[None, :], mask=g_ok[:, None] & (d < D)[None, :], other=0.0
        )
        if SCALED:
            scale *= tl.load(k_scale + h)
        m, total, acc = see(
            queries, k + h * k_head, v + h * v_head, slots, slot, first, last,
            tl.full([GROUP_PAD], -1e30, tl.float32), tl.zeros([GROUP_PAD], tl.float32),
            tl.zeros([GROUP_PAD, E_PAD], tl.float32), scale, softcap, k_slot, v_slot,
            D, D_PAD, E, E_PAD, BLOCK, SOFTCAP, PRECISION,
        )  # fmt: skip
        if SCALED:
            acc *= tl.load(v_scale + h)
        alone = True
        if SPLIT:
            low = tl.where(covered > 0, 0, num_prefix)  # only the rows that share a prefix have such parts
            alone = (used == 1) & (low == num_prefix)
        if alone:
            if SINKS:
                m, total, acc = add_sink(sinks, head, g_ok, m, total, acc)
            joined = acc / tl.where(total > 0, total, 1.0)[:, None]
            tl.store(
                out + b * out_row + head[:, None] * out_head + e[None, :],
                joined.to(out.dtype.element_ty),
                mask=g_ok[:, None] & e_ok[None, :],
            )
        elif SPLIT:
            first_head = b * tl.num_programs(0) * GROUP
            part = (first_head + head).to(tl.int64) * num_parts
            store_partial(part_out, part_lse, part + num_prefix + s, g_ok, e, e_ok, m, total, acc, E)
            counter = counters + b * tl.num_programs(0) + h
            tl.debug_barrier()  # all of this program's part is written before it counts as done
            if tl.atomic_add(counter, 1) == used - 1:
                tl.debug_barrier()
                tl.store(counter, 0)
                _join(
                    part_out, part_lse, sinks, out + b * out_row, out_head, first_head, h * GROUP,
                    low, num_prefix + used, num_parts, GROUP, GROUP_JOIN, E, E_PAD, JOINED, SINKS,
                )  # fmt: skip


@triton.jit
def _join(
    part_out, part_lse, sinks, out, out_head, first_head, kv_first, low, end, num_parts,
    GROUP: tl.constexpr, GROUP_JOIN: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr,
    JOINED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Weigh parts [low, end) of the heads of one KV head by their log-sum-exp."""
    g, e = tl.arange(0, GROUP_JOIN), tl.arange(0, E_PAD)
    g_ok = g < GROUP
    head = kv_first + g
    parts = (first_head + head).to(tl.int64)[:, None] * num_parts
    high = tl.full([GROUP_JOIN], -1e30, tl.float32)
    total = tl.zeros([GROUP_JOIN], tl.float32)
    acc = tl.zeros([GROUP_JOIN, E_PAD], tl.float32)
    for p in range(low, end, JOINED):
        s = p + tl.arange(0, JOINED)
        ok = g_ok[:, None] & (s < end)[None, :]
        part = parts + s[None, :]
        # from the second-level cache: other multiprocessors wrote them during this launch
        lse = tl.load(part_lse + part, mask=ok, other=-1e30, cache_modifier=".cg")
        values = tl.load(
            part_out + part[:, :, None] * E + e[None, None, :],
            mask=ok[:, :, None] & (e < E)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_high = tl.maximum(high, tl.max(lse, 1))
        weight = tl.where(lse > -1e29, tl.exp2(lse - new_high[:, None]), 0.0)
        shrink = tl.exp2(high - new_high)
        values = tl.where(weight[:, :, None] > 0, values, 0.0)  # a part without tokens may hold anything
        acc = acc * shrink[:, None] + tl.sum(values * weight[:, :, None], 1)
        total = total * shrink + tl.sum(weight, 1)
        high = new_high
    if SINKS:
        high, total, acc = add_sink(sinks, head, g_ok, high, total, acc)
    joined = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(
        out + head[:, None] * out_head + e[None, :],
        joined.to(out.dtype.element_ty),
        mask=g_ok[:, None] & (e < E)[None, :],
    )


@dataclass(frozen=True)
class Tile:
    """How a kernel is cut: tokens read at once, warps, and how many reads are under way."""

    block: int
    warps: int
    stages: int


def num_splits(num_rows: int, num_kv_heads: int, num_sms: int, head_dim: int = 128) -> int:
    """Parts to cut rows of one length into, so that two to four programs fall to each multiprocessor.

    Of large heads one and a half to three do, of which two run at once, and of larger ones somewhat fewer: one does.
    """
    splits, wanted = 1, 2.0 if head_dim <= 128 else 1.5 if head_dim <= 256 else 1.4
    while num_rows * num_kv_heads * splits < wanted * num_sms and splits < MAX_SPLITS:
        splits *= 2
    return splits


@dataclass(frozen=True)
class Workspace:
    """Room for the partial results of up to `num_rows` rows of `num_parts` parts each, in float32.

    counters  int32 [num_rows * num_heads]: how many parts of a row are done; all zero between launches
    """

    out: torch.Tensor  # [num_rows * num_heads * num_parts * v_dim]
    lse: torch.Tensor  # [num_rows * num_heads * num_parts], base 2
    counters: torch.Tensor

    @classmethod
    def allocate(cls, num_rows: int, num_heads: int, v_dim: int, num_parts: int, device: torch.device) -> Workspace:
        size = num_rows * num_heads * num_parts
        return cls(
            torch.empty(size * v_dim, dtype=torch.float32, device=device),
            torch.empty(size, dtype=torch.float32, device=device),
            torch.zeros(num_rows * num_heads, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True)
class DecodeRows:
    """The rows of a decode step, all on the device.

    table   int32 [num_table_rows, max_len]  the slots of a sequence's tokens
    rows    int32 [num_rows]                 which table row each query's sequence has
    lens    int32 [num_rows]                 tokens it sees, the new one included
    starts  int32 [num_rows]                 tokens that a shared prefix covers; 0 without one
    parts   how the rows are cut; None: all into as many parts
    """

    table: torch.Tensor
    rows: torch.Tensor
    lens: torch.Tensor
    starts: torch.Tensor
    parts: Parts | None = None


@dataclass(frozen=True)
class Scales:
    """The store holds k / k and v / v, in float8. float32 [num_kv_heads] each."""

    k: torch.Tensor
    v: torch.Tensor


def decode_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    step: DecodeRows,
    workspace: Workspace,
    params: AttentionParams,
    *,
    splits: int,
    num_prefix: int = 0,
    scales: Scales | None = None,
    tile: Tile | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend each row's newest token to the row's slots.

    q  [num_rows, num_heads, k_dim], last dimension dense
    k  [num_slots, num_kv_heads, k_dim], v [num_slots, num_kv_heads, v_dim], last dimension dense
    -> [num_rows, num_heads, v_dim], dtype of q, written to `out` if given; softmax in float32. A row of length 0 gives
       zeros.

    splits      parts that rows of one length are cut into
    num_prefix  parts that decode_prefix has written to `workspace` for the tokens before `step.starts`; the window must
                then be None
    """
    num_rows, num_heads, k_dim = q.shape
    num_kv_heads, v_dim = v.shape[1], v.shape[2]
    group = num_heads // num_kv_heads
    parts = step.parts or uniform_parts(num_rows, splits, q.device)
    num_parts = parts.most + num_prefix
    if tile is None:
        tile = tile_of(q.dtype, max(k_dim, v_dim))
        if k.element_size() == 2 and splits + num_prefix == 1:
            num_programs = num_rows * num_kv_heads / num_sms(q.device)
            tile = whole_tile(tile, max(k_dim, v_dim), num_programs)
            narrow = max(k_dim, v_dim) <= 64 and card_of(q.device).shared_memory >= 2 * LARGE_BYTES
            if narrow and num_programs <= FEW_NARROW:
                tile = NARROW_DEEP
        if k.element_size() == 2 and tile == LARGE and card_of(q.device).shared_memory >= 2 * LARGE_BYTES:
            tile = LARGE_DEEP
        if k.element_size() == 2 and tile == HUGE and card_of(q.device).shared_memory >= 2 * LARGE_BYTES:
            tile = HUGE_HOPPER
    k_scale, v_scale = (scales.k, scales.v) if scales is not None else (workspace.lse, workspace.lse)
    if out is None:
        out = torch.empty(num_rows, num_heads, v_dim, dtype=q.dtype, device=q.device)
    group_join = triton.next_power_of_2(group)
    _decode[(num_kv_heads, len(parts.items))](
        q, k, v, step.table, step.rows, step.lens, step.starts, parts.items, parts.counts, workspace.out, workspace.lse,
        workspace.counters, params.sinks if params.sinks is not None else workspace.lse, k_scale, v_scale, out,
        params.scale * LOG2E, (params.softcap or 1.0) * LOG2E, params.window or 0, *strides(q, k, v, step),
        out.stride(0), out.stride(1), num_prefix, num_parts,
        GROUP=group, GROUP_PAD=max(16, group_join), GROUP_JOIN=group_join, JOINED=max(JOINED // group_join, 1),
        SPLIT=num_parts > 1, WINDOW=params.window is not None, SOFTCAP=params.softcap is not None,
        SINKS=params.sinks is not None, SCALED=scales is not None,
        BLOCK=tile.block, num_warps=tile.warps, num_stages=tile.stages, **sizes(q, k_dim, v_dim),
    )  # fmt: skip
    return out


def strides(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: DecodeRows) -> tuple[int, ...]:
    return q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), step.table.stride(0)


def sizes(q: torch.Tensor, k_dim: int, v_dim: int) -> dict[str, int | str | bool]:
    """Options of a launch that both kernels take."""
    return {
        "D": k_dim, "D_PAD": triton.next_power_of_2(k_dim), "E": v_dim, "E_PAD": triton.next_power_of_2(v_dim),
        "PRECISION": precision(q.dtype), **pdl_options(q),
    }  # fmt: skip


def tile_of(dtype: torch.dtype, head_dim: int) -> Tile:
    """The tile that is fastest for heads of this size."""
    if head_dim > 256:
        return HUGE if dtype.itemsize == 2 else replace(HUGE, stages=1)
    return LARGE if dtype == torch.float32 or head_dim > 128 else Tile(64, 2, 2)


LARGE, LARGE_DEEP, LARGE_MANY = Tile(32, 4, 2), Tile(32, 4, 3), Tile(16, 2, 3)
"""Tiles of heads of more than 128 dimensions: the second where two of its programs fit a multiprocessor, the third
where each has three or more programs to run. On an H200 the second takes 10 to 15 % less time than the first."""

LARGE_BYTES = 98 << 10
"""Shared memory of LARGE_DEEP."""

HUGE, HUGE_HOPPER = Tile(16, 4, 2), Tile(32, 4, 2)
"""Tiles of heads of more than 256 dimensions, the second where a card has shared memory for it: 48 rows of 2,200
tokens, 4 KV heads, take 226 us on an H200, 258 with blocks of 16."""


NARROW_DEEP, FEW_NARROW = Tile(128, 4, 3), 3
"""The tile of heads of up to 64 dimensions for rows that are not split, and the largest number of programs for each
multiprocessor. On an H200 48 rows of 2,200 tokens, 8 KV heads, take 56 us, 74 with blocks of 64 by two warps; 192 rows
of 700 75 and 70."""

AT_ONCE = {8: Tile(32, 2, 2), 6: Tile(32, 1, 3), 5: Tile(32, 4, 2), 4: Tile(64, 2, 2)}
"""Tiles of 128 dimensions by how many of their programs a multiprocessor of Hopper runs at once."""

RELATIVE_TIME = {8: 1.0, 6: 0.85, 5: 1.0, 4: 1.0}
"""What a program of each tile takes, as a ratio, at the limit of power (on an H200, 256 rows of 576 tokens).

One warp that reads two blocks ahead takes the least energy.
"""


def whole_tile(base: Tile, head_dim: int, num_programs: float) -> Tile:
    """The tile for rows that are not split, of which each multiprocessor has `num_programs` to run.

    What runs at last, with few others beside it, leaves the memory idle: the tile is that whose programs come out even,
    unless another takes less in spite of it.
    """
    if base == LARGE and num_programs >= 3:
        return LARGE_MANY
    if triton.next_power_of_2(head_dim) != 128 or num_programs <= min(AT_ONCE):
        return base
    return AT_ONCE[min(AT_ONCE, key=lambda n: math.ceil(num_programs / n) * n * RELATIVE_TIME[n])]


@functools.cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 elsewhere."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
