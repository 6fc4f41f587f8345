"""Attention of many queries over the same keys by bfloat16 dot products: prefill_attention.py for AVX-512 BF16.

Both matmuls read their inputs in pairs. The store has keys as pairs of dimensions. Each task rearranges values as pairs
of keys, and the softmax is rounded to bfloat16 in such pairs. All sums are float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit

from graftlm.kernels.cpu.calls import COLUMNS, PrefillCall
from graftlm.kernels.cpu.compiled.object_code import MachineCode
from graftlm.kernels.cpu.loops.arithmetic import (
    FLAGS,
    add_done,
    allocate,
    at,
    exp,
    float_array,
    next_task,
    release,
)
from graftlm.kernels.cpu.loops.compiler import compile_loop
from graftlm.kernels.cpu.loops.register_tiles import outer_dot_tile
from graftlm.kernels.cpu.loops.softmax_tiles import highest_tile, weights_tile

KEYS = 64
"""Keys of a block, whose scores are in memory at once."""
_SLACK = 8
"""Powers of 2 by which a score may exceed its column's reference peak, so that sums are seldom rescaled."""

_F, _U = np.float32, np.uint32
_LOG2_E, _LN_2 = _F(1.4426950408889634), _F(0.6931471805599453)


def _matmul(*, add: bool) -> Any:
    """Return C [num_rows, columns] = A B, or C += A B, in `outer_dot_tile`'s layouts, for 16, 32 or 64 columns."""
    (eight_1, one_1), (eight_2, one_2), (four_4, one_4) = (
        [outer_dot_tile(rows, width, add=add) for rows in (most, 1)] for most, width in ((8, 1), (8, 2), (4, 4))
    )

    @njit(**FLAGS)
    def matmul(c, a, a_row, a_pair, b, num_rows, depth, columns):
        row = 0
        if columns == 16:
            while row + 8 <= num_rows:
                eight_1(c + row * 4 * COLUMNS, a + row * a_row, a_row, a_pair, b, depth)
                row += 8
            while row < num_rows:
                one_1(c + row * 4 * COLUMNS, a + row * a_row, a_row, a_pair, b, depth)
                row += 1
        elif columns == 32:
            while row + 8 <= num_rows:
                eight_2(c + row * 4 * COLUMNS, a + row * a_row, a_row, a_pair, b, depth)
                row += 8
            while row < num_rows:
                one_2(c + row * 4 * COLUMNS, a + row * a_row, a_row, a_pair, b, depth)
                row += 1
        else:
            while row + 4 <= num_rows:
                four_4(c + row * 4 * COLUMNS, a + row * a_row, a_row, a_pair, b, depth)
                row += 4
            while row < num_rows:
                one_4(c + row * 4 * COLUMNS, a + row * a_row, a_row, a_pair, b, depth)
                row += 1

    return matmul


def _softmax() -> Any:
    """Return the two halves of a softmax, `highest_tile` and `weights_tile`, for 16, 32 or 64 columns."""
    (h1, h2, h4), (m1, m2, m4) = ([highest_tile(w, masked=m) for w in (1, 2, 4)] for m in (False, True))
    w1, w2, w4 = (weights_tile(w) for w in (1, 2, 4))

    @njit(**FLAGS)
    def highest(to, scores, num_keys, last_seen, first, columns, hides):
        if columns == 16:
            if hides:
                m1(to, scores, num_keys, last_seen, first)
            else:
                h1(to, scores, num_keys, last_seen, first)
        elif columns == 32:
            if hides:
                m2(to, scores, num_keys, last_seen, first)
            else:
                h2(to, scores, num_keys, last_seen, first)
        elif hides:
            m4(to, scores, num_keys, last_seen, first)
        else:
            h4(to, scores, num_keys, last_seen, first)

    @njit(**FLAGS)
    def weights(to, sums, scores, shift, factor, num_pairs, columns):
        if columns == 16:
            w1(to, sums, scores, shift, factor, num_pairs)
        elif columns == 32:
            w2(to, sums, scores, shift, factor, num_pairs)
        else:
            w4(to, sums, scores, shift, factor, num_pairs)

    return highest, weights


highest_of, _weights = _softmax()

# Module-level: the loop below reads them as globals. Variables of its closure would be part of the cache key.
_scores, _add_values = _matmul(add=False), _matmul(add=True)


def compile_prefill_dots(k_dim: int, v_dim: int, group: int) -> MachineCode:
    """Compile the loop; `k_dim` is even. A task is one block of queries and one KV head."""

    def work(pointer):
        call = carray(pointer, 1)[0]
        num_blocks, num_kv_heads = call.num_blocks, call.num_kv_heads
        query_ptr = carray(at(call.query_ptr), num_blocks + 1, np.int64)
        span_ptr = carray(at(call.span_ptr), num_blocks + 1, np.int64)
        query = carray(at(call.query), query_ptr[num_blocks], np.int64)
        visible = carray(at(call.visible), query_ptr[num_blocks], np.int64)
        spans = carray(at(call.spans), (span_ptr[num_blocks], 2), np.int64)
        half = k_dim // 2
        memory = allocate(4 * (COLUMNS * (half + v_dim + KEYS + KEYS // 2 + 5) + KEYS // 2 * v_dim))
        q_pairs = carray(at(memory), (half, COLUMNS), np.uint32)
        total_at = memory + 4 * half * COLUMNS
        total, scores_at = float_array(total_at, (v_dim, COLUMNS))
        scores, weights_at = float_array(scores_at, (KEYS, COLUMNS))
        values_at = weights_at + 2 * KEYS * COLUMNS
        value_pairs = carray(at(values_at), (KEYS // 2, v_dim), np.uint32)
        peak, highest_at = float_array(values_at + 2 * KEYS * v_dim, (COLUMNS,))
        highest, place = float_array(highest_at, (COLUMNS,))
        weight, gained_at = float_array(place, (COLUMNS,))
        gained, last_seen_at = float_array(gained_at, (COLUMNS,))
        last_seen = carray(at(last_seen_at), COLUMNS, np.int32)
        factor = call.scale * _LOG2_E
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
            for d in range(half):
                for column in range(COLUMNS):
                    q_pairs[d, column] = _U(0)
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
                row = carray(at(call.q + offset * 2), half, np.uint32)
                for d in range(half):
                    q_pairs[d, column] = row[d]
            position = np.int64(0)
            for span in range(span_ptr[block], span_ptr[block + 1]):
                for first in range(spans[span, 0], spans[span, 1], KEYS):
                    num_keys = min(KEYS, spans[span, 1] - first, most - position)
                    if num_keys <= 0:
                        break
                    slot = head * call.num_slots + first
                    _scores(scores_at, call.k + slot * k_dim * 2, k_dim * 2, 4, memory, num_keys, k_dim, columns)
                    padded = num_keys + num_keys % 2
                    if num_keys < padded:
                        for column in range(columns):
                            scores[num_keys, column] = _F(-1e30)
                    hides = position + num_keys > least
                    highest_of(highest_at, scores_at, num_keys, last_seen_at, position, columns, hides)
                    num_raised = np.int64(0)
                    for column in range(columns):
                        raised = (highest[column] - peak[column]) * factor > _F(_SLACK)
                        num_raised += np.int64(raised)
                        gained[column] = exp((peak[column] - highest[column]) * call.scale) if raised else _F(1)
                        peak[column] = highest[column] if raised else peak[column]
                    if num_raised > 0:
                        for column in range(columns):
                            weight[column] *= gained[column]
                        for d in range(v_dim):
                            for column in range(columns):
                                total[d, column] *= gained[column]
                    for column in range(columns):
                        highest[column] = peak[column] * factor
                    _weights(weights_at, gained_at, scores_at, highest_at, factor, padded // 2, columns)
                    values = carray(at(call.v + slot * v_dim * 2), (num_keys, v_dim), np.uint16)
                    for j in range(0, num_keys - 1, 2):
                        for d in range(v_dim):
                            value_pairs[j // 2, d] = _U(values[j, d]) | (_U(values[j + 1, d]) << _U(16))
                    if num_keys < padded:
                        for d in range(v_dim):
                            value_pairs[num_keys // 2, d] = _U(values[num_keys - 1, d])
                    _add_values(total_at, values_at, 4, 4 * v_dim, weights_at, v_dim, padded, columns)
                    for column in range(columns):
                        weight[column] += gained[column]
                    position += num_keys
            for column in range(num_columns):
                token = query[first_query + column // group]
                offset = (token * num_kv_heads + head) * group + column % group
                row = carray(at(call.out + offset * v_dim * 4), v_dim, np.float32)
                inverse = _F(1) / weight[column]
                for d in range(v_dim):
                    row[d] = total[d, column] * inverse
                carray(at(call.lse + offset * 4), 1, np.float32)[0] = peak[column] * call.scale + np.log(weight[column])
        add_done(pointer, taken)
        release(memory)

    return compile_loop(PrefillCall, work)
