"""Attention of many queries over the same keys on a CPU, for prefill: one compiled loop on torch's own threads.

Queries are columns. Q is transposed once, K and V are read in the layout of the store, and the online softmax of a
query runs down its column: one instruction serves sixteen queries, without sums across a register.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit

from graftlm.kernels.cpu.calls import COLUMNS, PrefillCall
from graftlm.kernels.cpu.compiled.object_code import MachineCode
from graftlm.kernels.cpu.element_format import ElementFormat
from graftlm.kernels.cpu.loops.arithmetic import (
    FLAGS,
    add_done,
    allocate,
    at,
    exp,
    float_array,
    next_task,
    release,
    widen,
)
from graftlm.kernels.cpu.loops.compiler import compile_loop
from graftlm.kernels.cpu.loops.prefill_dots import compile_prefill_dots, highest_of
from graftlm.kernels.cpu.loops.register_tiles import has_bfloat16_dots, has_wide_registers, outer_tile
from graftlm.kernels.cpu.loops.softmax_tiles import float32_weights_tile

KEYS = 64
"""Keys of a block, whose scores are in memory at once."""


_SLACK = 8
"""Powers of 2 by which a score may exceed its column's reference peak, so that sums are seldom rescaled."""


def _any_rows(num_rows: int, width: int, element: ElementFormat, *, add: bool) -> Any:
    """Return the matmul of any number of rows: `num_rows` at a time, and the rest one by one."""
    many, one = (outer_tile(rows, width, a=element, add=add) for rows in (num_rows, 1))

    @njit(forceinline=True, **FLAGS)
    def matmul(c, a, a_row, a_step, b, rows, depth):
        row = 0
        while row + num_rows <= rows:
            many(c + row * 4 * COLUMNS, a + row * a_row, a_row, a_step, b, depth)
            row += num_rows
        while row < rows:
            one(c + row * 4 * COLUMNS, a + row * a_row, a_row, a_step, b, depth)
            row += 1

    return matmul


def _matmul(element: ElementFormat, *, add: bool = False) -> Any:
    """Return C [num_rows, columns] = A B, or C += A B, in `outer_tile`'s layouts, for 16, 32 or 64 columns."""
    wide = has_wide_registers()
    by_16, by_32, by_64, narrow = (
        _any_rows(rows, width, element, add=add) for rows, width in ((8, 1), (8, 2), (4, 4), (4, 1))
    )

    @njit(**FLAGS)
    def matmul(c, a, a_row, a_step, b, num_rows, depth, columns):
        if not wide:
            for place in range(0, 4 * columns, 64):
                narrow(c + place, a, a_row, a_step, b + place, num_rows, depth)
        elif columns == 16:
            by_16(c, a, a_row, a_step, b, num_rows, depth)
        elif columns == 32:
            by_32(c, a, a_row, a_step, b, num_rows, depth)
        else:
            by_64(c, a, a_row, a_step, b, num_rows, depth)

    return matmul


_WIDE = has_wide_registers()

_F = np.float32
_LOG2_E = _F(1.4426950408889634)


def _weights() -> Any:
    """Return `float32_weights_tile` for 16, 32 or 64 columns."""
    one, two, four = (float32_weights_tile(width) for width in (1, 2, 4))

    @njit(**FLAGS)
    def weights(sums, scores, shift, num_keys, columns):
        if columns == 16:
            one(sums, scores, shift, _LOG2_E, num_keys)
        elif columns == 32:
            two(sums, scores, shift, _LOG2_E, num_keys)
        else:
            four(sums, scores, shift, _LOG2_E, num_keys)

    return weights


_weights_of = _weights()


def compile_prefill_attention(group: int, k_dim: int, v_dim: int, number: int) -> MachineCode:
    """Compile the loop for format `number`. A task is one block of queries and one KV head."""
    kv_format = ElementFormat(number)
    if kv_format is ElementFormat.BFLOAT16 and has_bfloat16_dots() and k_dim % 2 == 0:
        return compile_prefill_dots(k_dim, v_dim, group)
    element, size = kv_format.raw, kv_format.size
    matmul, add_matmul = _matmul(kv_format), _matmul(kv_format, add=True)

    def work(pointer):
        call = carray(pointer, 1)[0]
        num_blocks, num_kv_heads = call.num_blocks, call.num_kv_heads
        query_ptr = carray(at(call.query_ptr), num_blocks + 1, np.int64)
        span_ptr = carray(at(call.span_ptr), num_blocks + 1, np.int64)
        query = carray(at(call.query), query_ptr[num_blocks], np.int64)
        visible = carray(at(call.visible), query_ptr[num_blocks], np.int64)
        spans = carray(at(call.spans), (span_ptr[num_blocks], 2), np.int64)
        memory = allocate(4 * COLUMNS * (k_dim + 2 * v_dim + KEYS + 5))
        q_columns, o = float_array(memory, (k_dim, COLUMNS))
        added, total_at = float_array(o, (v_dim, COLUMNS))
        total, s = float_array(total_at, (v_dim, COLUMNS))
        scores, place = float_array(s, (KEYS, COLUMNS))
        peak, place = float_array(place, (COLUMNS,))
        weight, kept_at = float_array(place, (COLUMNS,))
        kept, gained_at = float_array(kept_at, (COLUMNS,))
        gained, last_seen_at = float_array(gained_at, (COLUMNS,))
        last_seen = carray(at(last_seen_at), COLUMNS, np.int32)
        taken = 0
        while True:
            task = next_task(pointer)
            if task >= call.num_tasks:
                break
            taken += 1
            # a sequence's last blocks see most keys: they run first, so that threads end at about the same time
            block, head = num_blocks - 1 - task // num_kv_heads, task % num_kv_heads
            first_query = query_ptr[block]
            num_columns = (query_ptr[block + 1] - first_query) * group
            columns = 16 if num_columns <= 16 else 32 if num_columns <= 32 else COLUMNS
            for d in range(k_dim):
                for column in range(COLUMNS):
                    q_columns[d, column] = _F(0)
            for d in range(v_dim):
                for column in range(COLUMNS):
                    total[d, column] = _F(0)
            for column in range(COLUMNS):
                peak[column], weight[column] = _F(-1e30), _F(0)
            most, least = np.int64(0), np.int64(1 << 62)
            for column in range(COLUMNS):
                seen = visible[first_query + min(column, num_columns - 1) // group]
                last_seen[column] = np.int32(seen)
                most, least = max(most, seen), min(least, seen)
            for column in range(num_columns):
                token = query[first_query + column // group]
                offset = token * call.q_token + (head * group + column % group) * call.q_head
                row = carray(at(call.q + offset * size), k_dim, element)
                for d in range(k_dim):
                    q_columns[d, column] = widen(row[d]) * call.scale
            position = np.int64(0)
            for span in range(span_ptr[block], span_ptr[block + 1]):
                for first in range(spans[span, 0], spans[span, 1], KEYS):
                    num_keys = min(KEYS, spans[span, 1] - first, most - position)
                    if num_keys <= 0:
                        break
                    slot = head * call.num_slots + first
                    keys, values = call.k + slot * k_dim * size, call.v + slot * v_dim * size
                    matmul(s, keys, k_dim * size, size, memory, num_keys, k_dim, columns)
                    hides = position + num_keys > least
                    if _WIDE:
                        highest_of(kept_at, s, num_keys, last_seen_at, position, columns, hides)
                        num_raised = np.int64(0)
                        for column in range(columns):
                            raised = (kept[column] - peak[column]) * _LOG2_E > _F(_SLACK)
                            num_raised += np.int64(raised)
                            gained[column] = exp(peak[column] - kept[column]) if raised else _F(1)
                            peak[column] = kept[column] if raised else peak[column]
                        if num_raised > 0:
                            for column in range(columns):
                                weight[column] *= gained[column]
                            for d in range(v_dim):
                                for column in range(columns):
                                    total[d, column] *= gained[column]
                        for column in range(columns):
                            kept[column] = peak[column] * _LOG2_E
                        _weights_of(gained_at, s, kept_at, num_keys, columns)
                        add_matmul(total_at, values, size, v_dim * size, s, v_dim, num_keys, columns)
                        for column in range(columns):
                            weight[column] += gained[column]
                        position += num_keys
                        continue
                    if hides:
                        for j in range(num_keys):
                            for column in range(columns):
                                if position + j >= last_seen[column]:
                                    scores[j, column] = _F(-1e30)
                    for column in range(columns):
                        kept[column] = peak[column]
                    for j in range(num_keys):
                        for column in range(columns):
                            peak[column] = max(peak[column], scores[j, column])
                    for column in range(columns):
                        kept[column] = exp(kept[column] - peak[column])
                        gained[column] = _F(0)
                    for j in range(num_keys):
                        for column in range(columns):
                            x = exp(scores[j, column] - peak[column])
                            scores[j, column] = x
                            gained[column] += x
                    matmul(o, values, size, v_dim * size, s, v_dim, num_keys, columns)
                    # blocks are summed separately: one sum over thousands of keys has a larger rounding error
                    for column in range(columns):
                        weight[column] = weight[column] * kept[column] + gained[column]
                    for d in range(v_dim):
                        for column in range(columns):
                            total[d, column] = total[d, column] * kept[column] + added[d, column]
                    position += num_keys
            for column in range(num_columns):
                token = query[first_query + column // group]
                offset = (token * num_kv_heads + head) * group + column % group
                row = carray(at(call.out + offset * v_dim * 4), v_dim, np.float32)
                for d in range(v_dim):
                    row[d] = total[d, column] / weight[column]
                carray(at(call.lse + offset * 4), 1, np.float32)[0] = peak[column] + np.log(weight[column])
        add_done(pointer, taken)
        release(memory)

    return compile_loop(PrefillCall, work)
