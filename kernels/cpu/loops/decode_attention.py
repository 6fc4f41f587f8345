"""Attention of single queries on a CPU, for decode steps and short extends: one compiled loop on torch's own threads.

Each query reads its spans of slots in place, with an online softmax over blocks of keys. Unlike with one library call
per span, nothing is padded or merged, and bfloat16 is widened in registers. A run of queries, the last tokens of one
sequence, reads its keys together, so that keys come from memory once.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from graftlm.kernels.cpu import INT8_LARGEST, INT8_LEAST_SCALE, MAX_RUN
from graftlm.kernels.cpu.calls import DecodeCall
from graftlm.kernels.cpu.compiled.object_code import MachineCode
from graftlm.kernels.cpu.element_format import ElementFormat
from graftlm.kernels.cpu.loops.arithmetic import (
    FLAGS,
    add_done,
    allocate,
    at,
    exp,
    float_array,
    narrow,
    next_task,
    prefetch_all,
    release,
    widen,
)
from graftlm.kernels.cpu.loops.compiler import compile_loop
from graftlm.kernels.cpu.loops.matmul import row_major_matmul

BLOCK = 64
"""Keys of a block, whose scores are in memory at once."""

_F = np.float32


@njit(forceinline=True, **FLAGS)
def _score(scores, scaled, keys, num_keys, group, k_dim):
    """Set scores[g, j] = scaled[g] . keys[j], four keys for each load of the query."""
    whole = num_keys - num_keys % 4
    for j in range(0, whole, 4):
        for g in range(group):
            a, b, c, e = _F(0), _F(0), _F(0), _F(0)
            for d in range(k_dim):
                x = scaled[g, d]
                a += x * widen(keys[j, d])
                b += x * widen(keys[j + 1, d])
                c += x * widen(keys[j + 2, d])
                e += x * widen(keys[j + 3, d])
            scores[g, j], scores[g, j + 1], scores[g, j + 2], scores[g, j + 3] = a, b, c, e
    for j in range(whole, num_keys):
        for g in range(group):
            a = _F(0)
            for d in range(k_dim):
                a += scaled[g, d] * widen(keys[j, d])
            scores[g, j] = a


@njit(forceinline=True, **FLAGS)
def _softcap(scores, num_keys, softcap):
    """Set scores = softcap * tanh(scores / softcap), in place."""
    for j in range(num_keys):
        x = min(scores[j] / softcap * _F(2), _F(80))
        scores[j] = softcap * (_F(1) - _F(2) / (exp(x) + _F(1)))


@njit(forceinline=True, **FLAGS)
def _add(total, scores, values, num_keys, group, v_dim):
    """Add the sum over j of scores[g, j] * values[j] to total[g], four values for each load of the sum."""
    whole = num_keys - num_keys % 4
    for j in range(0, whole, 4):
        for g in range(group):
            a, b, c, e = scores[g, j], scores[g, j + 1], scores[g, j + 2], scores[g, j + 3]
            for d in range(v_dim):
                total[g, d] += (
                    a * widen(values[j, d])
                    + b * widen(values[j + 1, d])
                    + c * widen(values[j + 2, d])
                    + e * widen(values[j + 3, d])
                )
    for j in range(whole, num_keys):
        for g in range(group):
            a = scores[g, j]
            for d in range(v_dim):
                total[g, d] += a * widen(values[j, d])


@njit(forceinline=True, **FLAGS)
def _keep_exactly(store, scales, slot, row, dim):
    """Store `row` at `slot` of a head's store."""
    for d in range(dim):  # an assignment of whole rows takes numba 3 s to compile
        store[slot, d] = row[d]


@njit(forceinline=True, **FLAGS)
def _keep_int8(store, scales, slot, row, dim):
    """Store `row` at `slot` of a head's int8 store, rounded to multiples of its scale."""
    most = _F(0)
    for d in range(dim):
        most = max(most, abs(widen(row[d])))
    scale = max(most / _F(INT8_LARGEST), _F(INT8_LEAST_SCALE))
    scales[slot] = scale
    for d in range(dim):
        x = widen(row[d]) / scale
        store[slot, d] = np.int8(x + (_F(0.5) if x > _F(0) else _F(-0.5)))


@njit(forceinline=True, **FLAGS)
def _times(scores, scales, num_keys, group):
    """Multiply scores[g, j] by scales[j]."""
    for g in range(group):
        for j in range(num_keys):
            scores[g, j] *= scales[j]


def compile_decode_attention(group: int, k_dim: int, v_dim: int, number: int, capped: bool) -> MachineCode:
    """Compile the loop for format `number`. A task is one run of queries and one KV head."""
    return _compile(group, k_dim, v_dim, ElementFormat(number), capped, False)


def compile_decode_attention_int8(group: int, k_dim: int, v_dim: int, number: int, capped: bool) -> MachineCode:
    """Compile the loop over stores in int8; queries, keys and values of the step have format `number`."""
    return _compile(group, k_dim, v_dim, ElementFormat(number), capped, True)


def _compile(group: int, k_dim: int, v_dim: int, step_format: ElementFormat, capped: bool, int8: bool) -> MachineCode:
    element, size = step_format.raw, step_format.size
    kept_element, keep = (np.int8, _keep_int8) if int8 else (element, _keep_exactly)
    kept_size = 1 if int8 else size
    products = row_major_matmul(step_format)
    in_tiles = k_dim % 16 == 0 and not int8

    def work(pointer):
        call = carray(pointer, 1)[0]
        num_runs, num_kv_heads = call.num_runs, call.num_kv_heads
        query = carray(at(call.query), call.num_queries, np.int64)
        indptr = carray(at(call.indptr), call.num_queries + 1, np.int64)
        spans = carray(at(call.spans), (indptr[call.num_queries], 2), np.int64)
        runs = carray(at(call.runs), num_runs + 1, np.int64)
        keys = carray(at(call.k), (num_kv_heads, call.num_slots, k_dim), kept_element)
        values = carray(at(call.v), (num_kv_heads, call.num_slots, v_dim), kept_element)
        k_scales = carray(at(call.k_scale), (num_kv_heads, call.num_slots), np.float32)
        v_scales = carray(at(call.v_scale), (num_kv_heads, call.num_slots), np.float32)
        sizes = group * BLOCK + group * v_dim + MAX_RUN * group * (v_dim + k_dim + 2) + group
        memory = allocate(4 * sizes)
        scores, place = float_array(memory, (group, BLOCK))
        added, place = float_array(place, (group, v_dim))
        total, queries = float_array(place, (MAX_RUN, group, v_dim))
        scaled, place = float_array(queries, (MAX_RUN, group, k_dim))
        peak, place = float_array(place, (MAX_RUN, group))
        weight, place = float_array(place, (MAX_RUN, group))
        kept, place = float_array(place, (group,))
        taken = 0
        while True:
            task = next_task(pointer)
            if task >= call.num_tasks:
                break
            taken += 1
            # head by head, so that queries with a common prefix find this head of it in their core's cache
            head, run = task // num_runs, task % num_runs
            begin, longest = runs[run], runs[run + 1] - 1
            num_together = longest + 1 - begin
            for i in range(num_together):
                for g in range(group):
                    offset = query[begin + i] * call.q_token + (head * group + g) * call.q_head
                    row = carray(at(call.q + offset * size), k_dim, element)
                    for d in range(k_dim):
                        scaled[i, g, d] = widen(row[d]) * call.scale
                    for d in range(v_dim):
                        total[i, g, d] = _F(0)
                    peak[i, g], weight[i, g] = _F(-1e30), _F(0)
            if call.new_k != 0:
                slot = spans[indptr[longest + 1] - 1, 1] - 1
                offset = query[longest] * call.k_token + head * call.k_head
                row = carray(at(call.new_k + offset * size), k_dim, element)
                keep(keys[head], k_scales[head], slot, row, k_dim)
                offset = query[longest] * call.v_token + head * call.v_head
                row = carray(at(call.new_v + offset * size), v_dim, element)
                keep(values[head], v_scales[head], slot, row, v_dim)
            left = np.int64(0)  # remaining keys of the run's last query; each earlier query sees one fewer
            for span in range(indptr[longest], indptr[longest + 1]):
                left += spans[span, 1] - spans[span, 0]
            for span in range(indptr[longest], indptr[longest + 1]):
                for first in range(spans[span, 0], spans[span, 1], BLOCK):
                    here = min(BLOCK, spans[span, 1] - first)
                    # the values are read after the scores: a span of a decode step is too short for hardware to predict
                    prefetch_all(call.v + (head * call.num_slots + first) * v_dim * kept_size, here * v_dim * kept_size)
                    for i in range(num_together):
                        num_keys = min(here, left - (num_together - 1 - i))
                        if num_keys <= 0:
                            continue
                        if in_tiles and num_keys >= 4:
                            here_k = call.k + (head * call.num_slots + first) * k_dim * size
                            here_q = queries + i * group * k_dim * 4
                            products(memory, here_q, 4 * k_dim, here_k, group, k_dim, num_keys)
                        else:
                            _score(scores, scaled[i], keys[head, first : first + num_keys], num_keys, group, k_dim)
                        if int8:
                            _times(scores, k_scales[head, first : first + num_keys], num_keys, group)
                        for g in range(group):
                            if capped:
                                _softcap(scores[g], num_keys, call.softcap)
                            highest = peak[i, g]
                            for j in range(num_keys):
                                highest = max(highest, scores[g, j])
                            kept[g] = exp(peak[i, g] - highest)
                            gained = _F(0)
                            for j in range(num_keys):
                                x = exp(scores[g, j] - highest)
                                scores[g, j] = x
                                gained += x
                            peak[i, g], weight[i, g] = highest, weight[i, g] * kept[g] + gained
                            for d in range(v_dim):
                                added[g, d] = _F(0)
                        if int8:
                            _times(scores, v_scales[head, first : first + num_keys], num_keys, group)
                        # blocks are summed separately: one sum over thousands of keys has a larger rounding error
                        _add(added, scores, values[head, first : first + num_keys], num_keys, group, v_dim)
                        for g in range(group):
                            for d in range(v_dim):
                                total[i, g, d] = total[i, g, d] * kept[g] + added[g, d]
                    left -= here
            for i in range(num_together):
                for g in range(group):
                    offset = (query[begin + i] * num_kv_heads + head) * group + g
                    if call.float32_out != 0:
                        wide = carray(at(call.out + offset * v_dim * 4), v_dim, np.float32)
                        for d in range(v_dim):
                            wide[d] = total[i, g, d] / weight[i, g]
                    else:
                        row = carray(at(call.out + offset * v_dim * size), v_dim, element)
                        for d in range(v_dim):
                            row[d] = narrow(total[i, g, d] / weight[i, g], row)
                    carray(at(call.lse + offset * 4), 1, np.float32)[0] = peak[i, g] + np.log(weight[i, g])
        add_done(pointer, taken)
        release(memory)

    return compile_loop(DecodeCall, work)
