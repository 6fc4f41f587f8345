"""Decode attention over keys and values in 12 bits a number (bits12/kv_codec.py).

As in gpu/attention/decode.py, a program has a row, a KV head and a part of the row's tokens; the last part to end joins
all parts. Here a program is one warp, whose threads copy their own operands into shared memory some blocks ahead, and
unpack codes to the matrix units' first factor in their registers: keys by tokens, values by dimensions. Queries are
padded to 8 columns, and only probabilities move between threads. The kernel is in Gluon, the level below Triton.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from graftlm.kernels.attention_params import AttentionParams
from graftlm.kernels.bits12.kv_fragments import copied, dims_of_keys, dims_of_values, keys_of, shared_layout, values_of
from graftlm.kernels.gpu.attention.decode import ANYWHERE, DecodeRows, Workspace, num_sms
from graftlm.kernels.gpu.attention.online_softmax import LOG2E, softcapped
from graftlm.kernels.gpu.attention.split_kv import PARTS, uniform_parts
from graftlm.kernels.gpu.pdl import grid_wait, launch_dependents, pdl_options
from graftlm.kernels.hopper.tiles import barrier

copy = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared

MAX_GROUP = 8
"""The largest number of query heads of a KV head: they are the columns of a matmul."""

# A code is the number times 2^(15 - exponent). Queries and probabilities are multiplied by further powers of two, so
# that no product underflows float32.
_KEY_BIAS = gl.constexpr(16)
_KEY_FACTOR = gl.constexpr(2.0**96)
_VALUE_BIAS = gl.constexpr(24)
_VALUE_FACTOR = gl.constexpr(2.0**88)

_MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]))
_PARTS = gl.constexpr(PARTS)


def tokens_of(dim: int) -> int:
    """Return the tokens of a block: a multiple of 16, the depth of a matmul, and enough to amortise a softmax."""
    return 32 if dim < 128 else 16


@gluon.jit
def _scale(exponent, bias: gl.constexpr):
    """Return 2^(exponent - 127 + bias) in float32; infinite on overflow, NaN for the exponent 255.

    An infinite score may be negative, and its token would have no weight.
    """
    return (gl.minimum(exponent + bias, 255) << 23 | (exponent + 1) >> 8).to(gl.float32, bitcast=True)


@gluon.jit
def _slots(slots, first, last, T: gl.constexpr, layout: gl.constexpr, WIDE: gl.constexpr):
    """Return the slots of the block's T tokens; the last token's slot beyond the end."""
    n = gl.minimum(first + gl.arange(0, T, layout=layout), last - 1)
    slot = gl.load(slots + gl.maximum(n, 0))
    return slot.to(gl.int64) if WIDE else slot


@gluon.jit
def _early_slots(slots, first, last, T, layout, STAGES, WIDE):
    """Return the slots of the tokens of the first `STAGES` blocks."""
    found = ()
    for block in gl.static_range(STAGES):
        found += (_slots(slots, first + block * T, last, T, layout, WIDE),)
    return found


@gluon.jit
def _copy_block(records, shared, stage, slot, slot_words, there):
    """Start to copy the words of a block into the shared memory of `stage`, if it is `there`."""
    if there:
        k_low, k_high, v_low, v_high = shared
        LOW: gl.constexpr = k_low.shape[2]
        HIGH: gl.constexpr = k_high.shape[2]
        copy_low: gl.constexpr = copied(LOW)
        copy_high: gl.constexpr = copied(HIGH)
        i = gl.arange(0, LOW, layout=gl.SliceLayout(0, copy_low))
        j = gl.arange(0, HIGH, layout=gl.SliceLayout(0, copy_high))
        slot *= slot_words
        low = gl.convert_layout(slot, gl.SliceLayout(1, copy_low))[:, None] + i[None, :]
        high = gl.convert_layout(slot, gl.SliceLayout(1, copy_high))[:, None] + j[None, :] + LOW
        copy(k_low.index(stage), records + low)
        copy(k_high.index(stage), records + high)
        copy(v_low.index(stage), records + low + LOW + HIGH)
        copy(v_high.index(stage), records + high + LOW + HIGH)
    async_copy.commit_group()


@gluon.jit(do_not_specialize=["num_prefix", "num_parts", "window", "e_head"], do_not_specialize_on_alignment=ANYWHERE)
def _decode(
    q, records, exponents, table, rows, lens, starts, items, counts, part_out, part_lse, counters, sinks, out,
    scale, softcap, window, q_row, q_head, slot_words, head_words, e_head, table_row, out_row, out_head,
    num_prefix, num_parts,
    GROUP: gl.constexpr, D: gl.constexpr, T: gl.constexpr, STAGES: gl.constexpr, WIDE: gl.constexpr,
    SPLIT: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, SINKS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Program (KV head, item): tokens [first, last) of a row's part of the table."""
    launch_dependents(PDL)
    LOW: gl.constexpr = D // 4
    HIGH: gl.constexpr = D // 8
    tokens: gl.constexpr = gl.SliceLayout(1, _MMA)
    columns: gl.constexpr = gl.SliceLayout(0, _MMA)
    factor: gl.constexpr = gl.DotOperandLayout(0, _MMA, 2)
    other: gl.constexpr = gl.DotOperandLayout(1, _MMA, 2)
    one_each: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    h, item = gl.program_id(0), gl.load(items + gl.program_id(1))
    b, s = item // _PARTS, item % _PARTS
    length = gl.load(lens + b)
    covered = gl.load(starts + b)
    slots = table + gl.load(rows + b).to(gl.int64) * table_row
    start = covered
    if WINDOW:
        start = gl.maximum(start, length - window)
    per_split = gl.maximum(gl.cdiv(gl.cdiv(length - start, gl.load(counts + b)), T), 1) * T
    used = gl.maximum(gl.cdiv(length - start, per_split), 1)  # parts that have tokens; at least one
    first = start + s * per_split
    last = gl.minimum(first + per_split, length)
    early = _early_slots(slots, first, last, T, one_each, STAGES, WIDE)
    e_slots = _slots(slots, first, last, T, tokens, False)
    grid_wait(PDL)
    if s < used:
        shared = (
            gl.allocate_shared_memory(gl.int32, [STAGES, T, LOW], shared_layout(LOW)),
            gl.allocate_shared_memory(gl.int32, [STAGES, T, HIGH], shared_layout(HIGH)),
            gl.allocate_shared_memory(gl.int32, [STAGES, T, LOW], shared_layout(LOW)),
            gl.allocate_shared_memory(gl.int32, [STAGES, T, HIGH], shared_layout(HIGH)),
        )
        k_low, k_high, v_low, v_high = shared
        records += h * head_words
        exponents += h * e_head
        for block in gl.static_range(STAGES - 1):
            _copy_block(records, shared, block, early[block], slot_words, first + block * T < last)
        slot = early[STAGES - 1]
        exponent = gl.load(exponents + e_slots)
        e_slots = _slots(slots, first + T, last, T, tokens, False)
        # inputs of a matmul in the order of the keys in the threads
        dim = dims_of_keys(D, gl.SliceLayout(1, other))
        g = gl.arange(0, 8, layout=gl.SliceLayout(0, other))
        queries = gl.load(
            q + b * q_row + ((h * GROUP + g) * q_head)[None, :] + dim[:, None], mask=(g < GROUP)[None, :], other=0.0
        )
        queries = (queries.to(gl.float32) * _KEY_FACTOR).to(gl.bfloat16)
        m = gl.full([8], -1e30, gl.float32, columns)
        weights = gl.zeros([T, 8], gl.float32, _MMA)
        acc = gl.zeros([D, 8], gl.float32, _MMA)
        n = gl.arange(0, T, layout=tokens)
        stage = 0
        for position in range(first, last, T):
            async_copy.wait_group(STAGES - 2)
            barrier()
            ahead = stage + STAGES - 1
            ahead = gl.where(ahead >= STAGES, ahead - STAGES, ahead)
            _copy_block(records, shared, ahead, slot, slot_words, position + (STAGES - 1) * T < last)
            slot = _slots(slots, position + STAGES * T, last, T, one_each, WIDE)
            now = exponent.to(gl.int32)
            exponent = gl.load(exponents + e_slots)
            e_slots = _slots(slots, position + 2 * T, last, T, tokens, False)
            keys = keys_of(k_low.index(stage), k_high.index(stage))
            x = mma_v2(
                gl.convert_layout(keys, factor, assert_trivial=True), queries, gl.zeros([T, 8], gl.float32, _MMA)
            )
            x *= (_scale(now & 0xFF, _KEY_BIAS) * scale)[:, None]
            if SOFTCAP:
                x = softcapped(x, softcap)
            x = gl.where((position + n < last)[:, None], x, -1e30)
            high = gl.maximum(m, gl.max(x, 0))
            p = gl.exp2(x - high[None, :])
            shrink = gl.exp2(m - high)
            weights = weights * shrink[None, :] + p
            p = (p * _scale(now >> 8 & 0xFF, _VALUE_BIAS)[:, None]).to(gl.bfloat16)
            values = values_of(v_low.index(stage), v_high.index(stage))
            if gl.max(gl.where(high > m, 1, 0), 0) > 0:
                acc *= shrink[None, :]
            acc = mma_v2(gl.convert_layout(values, factor, assert_trivial=True), gl.convert_layout(p, other), acc)
            m = high
            stage = gl.where(stage + 1 >= STAGES, 0, stage + 1)
        async_copy.wait_group(0)
        total = gl.sum(weights, 0)
        acc *= _VALUE_FACTOR
        e = dims_of_values(D, tokens)
        g = gl.arange(0, 8, layout=columns)
        g_ok = g < GROUP
        head = h * GROUP + g
        alone = True
        if SPLIT:
            low = gl.where(covered > 0, 0, num_prefix)  # only rows that share a prefix have prefix parts
            alone = (used == 1) & (low == num_prefix)
        if alone:
            if SINKS:
                sink = gl.load(sinks + head, mask=g_ok, other=0.0).to(gl.float32) * 1.4426950408889634
                high = gl.maximum(m, sink)
                shrink = gl.exp2(m - high)
                total = total * shrink + gl.exp2(sink - high)
                acc *= shrink[None, :]
            found = acc / gl.where(total > 0, total, 1.0)[None, :]
            gl.store(
                out + b * out_row + (head * out_head)[None, :] + e[:, None],
                found.to(out.dtype.element_ty),
                mask=g_ok[None, :],
            )
        elif SPLIT:
            num_heads = gl.num_programs(0) * GROUP
            part = (b * num_heads + head).to(gl.int64) * num_parts + num_prefix + s
            has = total > 0
            safe = gl.where(has, total, 1.0)
            gl.store(part_out + (part * D)[None, :] + e[:, None], acc / safe[None, :], mask=g_ok[None, :])
            gl.store(part_lse + part, gl.where(has, m + gl.log2(safe), -1e30), mask=g_ok)
            counter = counters + b * gl.num_programs(0) + h
            barrier()  # the whole part is written before it counts as done
            if gl.atomic_add(counter, 1) == used - 1:
                barrier()
                gl.store(counter, 0)
                _join(
                    part_out, part_lse, sinks, out + b * out_row, out_head, b * num_heads, h * GROUP,
                    low, num_prefix + used, num_parts, GROUP, D, SINKS,
                )  # fmt: skip


@gluon.jit
def _join(
    part_out, part_lse, sinks, out, out_head, first_head, kv_first, low, end, num_parts,
    GROUP: gl.constexpr, D: gl.constexpr, SINKS: gl.constexpr,
):  # fmt: skip
    """Merge parts [low, end) of the heads of one KV head by their log-sum-exp."""
    HEADS: gl.constexpr = triton.next_power_of_2(GROUP)
    PARTS: gl.constexpr = 16 // HEADS if D <= 128 else 8 // HEADS
    parts_of: gl.constexpr = gl.BlockedLayout([HEADS, PARTS, D // 32], [1, 1, 32], [1, 1, 1], [2, 1, 0])
    heads: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, parts_of))
    g = gl.arange(0, HEADS, layout=heads)
    s = gl.arange(0, PARTS, layout=gl.SliceLayout(0, gl.SliceLayout(2, parts_of)))
    e = gl.arange(0, D, layout=gl.SliceLayout(0, gl.SliceLayout(1, parts_of)))
    g_ok = g < GROUP
    head = kv_first + g
    rows = (first_head + head).to(gl.int64)[:, None] * num_parts
    high = gl.full([HEADS], -1e30, gl.float32, heads)
    total = gl.zeros([HEADS], gl.float32, heads)
    acc = gl.zeros([HEADS, D], gl.float32, gl.SliceLayout(1, parts_of))
    of_acc: gl.constexpr = gl.SliceLayout(1, acc.type.layout)  # one value for each head, in the layout of acc
    for p in range(low, end, PARTS):
        ok = g_ok[:, None] & (p + s < end)[None, :]
        part = rows + (p + s)[None, :]
        # from the second-level cache: other multiprocessors wrote the parts during this launch
        lse = gl.load(part_lse + part, mask=ok, other=-1e30, cache_modifier=".cg")
        values = gl.load(
            part_out + (part * D)[:, :, None] + e[None, None, :],
            mask=ok[:, :, None],
            other=0.0,
            cache_modifier=".cg",
        )
        new_high = gl.maximum(high, gl.max(lse, 1))
        weight = gl.where(lse > -1e29, gl.exp2(lse - new_high[:, None]), 0.0)
        shrink = gl.exp2(high - new_high)
        values = gl.where(weight[:, :, None] > 0, values, 0.0)  # a part without tokens is uninitialised
        acc = acc * gl.convert_layout(shrink, of_acc)[:, None] + gl.sum(values * weight[:, :, None], 1)
        total = total * shrink + gl.sum(weight, 1)
        high = new_high
    if SINKS:
        sink = gl.load(sinks + head, mask=g_ok, other=0.0).to(gl.float32) * 1.4426950408889634
        new_high = gl.maximum(high, sink)
        shrink = gl.exp2(high - new_high)
        total = total * shrink + gl.exp2(sink - new_high)
        acc *= gl.convert_layout(shrink, of_acc)[:, None]
    found = acc / gl.convert_layout(gl.where(total > 0, total, 1.0), of_acc)[:, None]
    g = gl.arange(0, HEADS, layout=of_acc)
    e = gl.arange(0, D, layout=gl.SliceLayout(0, acc.type.layout))
    gl.store(
        out + ((kv_first + g) * out_head)[:, None] + e[None, :],
        found.to(out.dtype.element_ty),
        mask=(g < GROUP)[:, None],
    )


def num_registers(head_dim: int) -> int:
    """Return the registers of a thread: no spills, nine concurrent programs of large heads, sixteen of small ones."""
    return 128 if head_dim <= 128 else 224


def num_splits(num_rows: int, num_kv_heads: int, num_sms: int, head_dim: int = 128) -> int:
    """Return the number of parts of rows of one length, by the programs for each multiprocessor."""
    splits, programs, few = 1, num_rows * num_kv_heads / num_sms, 2.75 if head_dim <= 128 else 2.25
    while (programs < 2 * few and splits < 4) or (programs < few and splits < 16):
        splits, programs = 2 * splits, 2 * programs
    return splits


def num_stages(num_programs: float, head_dim: int = 128) -> int:
    """Return the blocks in shared memory: the most with which all programs of a multiprocessor run concurrently."""
    if head_dim > 128:
        return 4 if num_programs <= 4 else 3 if num_programs <= 6 else 2
    return 8 if num_programs <= 4 else 4 if num_programs <= 9 else 2


def compact_decode_attention(
    q: torch.Tensor,
    records: torch.Tensor,
    exponents: torch.Tensor,
    step: DecodeRows,
    workspace: Workspace,
    params: AttentionParams,
    *,
    splits: int,
    num_prefix: int = 0,
    out: torch.Tensor | None = None,
    stages: int | None = None,
) -> torch.Tensor:
    """Attend each row's newest token to the row's slots; see gpu/attention/decode.py: decode_attention.

    q          bfloat16 [num_rows, num_heads, head_dim], last dimension dense, at most 8 heads for each KV head
    records    int32 [num_slots, num_kv_heads, 2 * words], last dimension dense: words of K, then of V (kv_codec.py)
    exponents  uint8 [num_kv_heads, num_slots, 2]
    num_prefix parts of each row that an earlier kernel has written to `workspace`, for tokens before `step.starts`
    stages     blocks in shared memory; None chooses by the number of programs
    -> bfloat16 [num_rows, num_heads, head_dim], written to `out` if given
    """
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = records.shape[1]
    parts = step.parts or uniform_parts(num_rows, splits, q.device)
    num_parts = parts.most + num_prefix
    if stages is None:
        stages = num_stages(num_rows * num_kv_heads * splits / num_sms(q.device), head_dim)
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _decode[(num_kv_heads, len(parts.items))](
        q, records, exponents.view(torch.int16), step.table, step.rows, step.lens, step.starts,
        parts.items, parts.counts, workspace.out, workspace.lse, workspace.counters,
        params.sinks if params.sinks is not None else workspace.lse, out,
        params.scale * LOG2E, (params.softcap or 1.0) * LOG2E, params.window or 0, q.stride(0), q.stride(1),
        records.stride(0), records.stride(1), exponents.shape[1], step.table.stride(0), out.stride(0), out.stride(1),
        num_prefix, num_parts,
        GROUP=num_heads // num_kv_heads, D=head_dim, T=tokens_of(head_dim), STAGES=stages,
        WIDE=records.numel() >= 1 << 31, SPLIT=num_parts > 1, WINDOW=params.window is not None,
        SOFTCAP=params.softcap is not None, SINKS=params.sinks is not None,
        num_warps=1, maxnreg=num_registers(head_dim), **pdl_options(q),
    )  # fmt: skip
    return out
