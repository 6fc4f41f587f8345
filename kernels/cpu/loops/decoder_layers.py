"""Compiled code of decoder layers in steps of few tokens: any number of layers, or half of one, or several whole steps.

Decoding is bound by reading weights, so the remaining work must be nearly free. Every thread runs the whole call. A
layer is a sequence of phases; in each phase a thread runs the next task until none is left, and proceeds once all tasks
are finished. A descheduled thread thus delays the others by one task only. At the end of a step all threads meet, and
one of them prepares the next step. Matmuls and attention are separate loops, called by their addresses.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from graftlm.kernels.cpu.calls import (
    AFTER,
    ATTEND,
    BEFORE,
    EXPERT_PHASES,
    PHASES,
    ExpertsCall,
    LayerCall,
    LayersCall,
    MatmulCall,
)
from graftlm.kernels.cpu.compiled.object_code import MachineCode
from graftlm.kernels.cpu.element_format import ElementFormat
from graftlm.kernels.cpu.loops.arithmetic import (
    FLAGS,
    add_done,
    allocate,
    at,
    call_at,
    copy_row,
    exp,
    float_array,
    is_first,
    likeliest,
    narrow,
    next_task,
    norm_row,
    release,
    rotate,
    rounded,
    store_row,
    wait_until_done,
    widen,
)
from graftlm.kernels.cpu.loops.compiler import compile_loop


@njit(forceinline=True, **FLAGS)
def _meet(barrier):
    if barrier != 0:
        call_at(barrier, 0)


@njit(forceinline=True, **FLAGS)
def _finish(call):
    """Wait until all tasks of the call at an address are finished; do nothing for 0."""
    if call != 0:
        wait_until_done(call, carray(at(call), 3, np.int64)[2])


@njit(forceinline=True, **FLAGS)
def _reset(counters):
    """Reset the counters at an address; do nothing for 0."""
    if counters != 0:
        pair = carray(at(counters), 2, np.int64)
        pair[0] = pair[1] = 0


@njit(forceinline=True, **FLAGS)
def _join(to, prefix, lse, prefix_lse):
    """Merge attention to a row's own keys, in `to`, with attention to its prefix, for one head."""
    most = max(lse, prefix_lse)
    own, other = exp(lse - most), exp(prefix_lse - most)
    own, other = own / (own + other), other / (own + other)
    for d in range(len(to)):
        to[d] = to[d] * own + prefix[d] * other


_layer_call, _matmul_call, _experts_call = np.dtype(LayerCall), np.dtype(MatmulCall), np.dtype(ExpertsCall)


@njit(forceinline=True, **FLAGS)
def _end_step(call, num_phases):
    """Advance the call to the next step. -> whether there is one"""
    for i in range(num_phases):
        _reset(call.counters + 16 * i)
    layers = carray(at(call.layers), call.num_layers, _layer_call)
    for index in range(call.num_layers):
        layer = layers[index]
        _reset(layer.qkv)
        _reset(layer.prefixes)
        _reset(layer.blocks)
        _reset(layer.singles)
        _reset(layer.o)
        _reset(layer.gate_up)
        _reset(layer.down)
        if layer.mixture != 0:
            experts = carray(at(layer.mixture), 1, _experts_call)[0]
            for phase in range(EXPERT_PHASES):
                _reset(experts.counters + 16 * phase)
    _reset(call.head)
    _reset(call.rows)
    left = call.num_steps - call.steps_done - 1
    if call.tokens != 0:
        num_rows = call.num_rows
        tokens = carray(at(call.tokens + call.steps_done * num_rows * 8), num_rows, np.int64)
        ids, end_ptr = carray(at(call.ids), num_rows, np.int64), carray(at(call.end_ptr), num_rows + 1, np.int64)
        ends = carray(at(call.ends), end_ptr[num_rows], np.int64)
        for row in range(num_rows):
            ids[row] = tokens[row]
            if tokens[row] < 0:
                left = 0
            for i in range(end_ptr[row], end_ptr[row + 1]):
                if ends[i] == tokens[row]:
                    left = 0
        if carray(at(call.interrupt), 1, np.int64)[0] != 0:
            left = 0
        grow = carray(at(call.grow), call.num_grow, np.int64)
        for i in range(call.num_grow):
            carray(at(grow[i]), 1, np.int64)[0] += 1
    call.steps_done += 1
    call.steps_left = left


def compile_decoder_layers(number: int) -> MachineCode:
    """Compile `void (LayersCall *)` for format `number`."""
    element, size = ElementFormat(number).raw, ElementFormat(number).size

    @njit(forceinline=True, **FLAGS)
    def run_step(call):
        num_rows, hidden = call.num_rows, call.hidden_size
        layers = carray(at(call.layers), call.num_layers, _layer_call)
        like = carray(at(call.x), hidden, element)
        counter = call.counters
        if call.ids != 0 and call.gather != 0:
            call_at(call.gather, call.rows)
            _finish(call.rows)
        for index in range(call.num_layers):
            layer = layers[index]
            dim, num_heads, num_kv_heads = layer.head_dim, layer.num_heads, layer.num_kv_heads
            width, attended_size = num_heads + 2 * num_kv_heads, num_heads * dim
            if call.parts & BEFORE:
                qkv, taken = carray(at(layer.qkv), 1, _matmul_call)[0], 0
                while True:
                    row = next_task(at(counter))
                    if row >= num_rows:
                        break
                    taken += 1
                    x = carray(at(call.x + row * hidden * size), hidden, element)
                    if index == 0 and call.ids != 0 and call.gather == 0:
                        token = carray(at(call.ids), num_rows, np.int64)[row]
                        embedded = carray(at(call.embedding + token * hidden * size), hidden, element)
                        for d in range(hidden):
                            x[d] = narrow(widen(embedded[d]) * call.embedding_scale, x)
                    to = carray(at(qkv.x + row * qkv.x_row * 4), qkv.depth, np.float32)
                    norm_row(to, x, layer.norm, layer.wide, hidden, layer.eps)
                add_done(at(counter), taken)
                wait_until_done(counter, num_rows)
                call_at(call.matmul, layer.qkv)
                _finish(layer.qkv)
                memory, taken = allocate(4 * dim), 0
                wide, _ = float_array(memory, (dim,))
                while True:
                    row = next_task(at(counter + 16))
                    if row >= num_rows:
                        break
                    taken += 1
                    place = carray(at(call.positions), num_rows, np.int64)[row] * call.table_row
                    place = (place + layer.table * call.table_size) * size
                    cos = carray(at(call.cos + place), call.rotary_dim, element)
                    sin = carray(at(call.sin + place), call.rotary_dim, element)
                    for head in range(width):
                        x = carray(at(layer.qkv_out + (row * width + head) * dim * size), dim, element)
                        if head < num_heads + num_kv_heads:
                            norm = layer.q_norm if head < num_heads else layer.k_norm
                            if norm != 0:
                                norm_row(wide, x, norm, layer.wide, dim, layer.head_eps)
                                store_row(x, wide)
                            rotate(x, cos, sin, call.rotary_dim // 2)
                        if head >= num_heads and layer.k_store != 0:
                            slot = carray(at(call.slots), num_rows, np.int64)[row]
                            store, kv_head = layer.k_store, head - num_heads
                            if kv_head >= num_kv_heads:
                                store, kv_head = layer.v_store, kv_head - num_kv_heads
                            slot += kv_head * layer.num_slots
                            stored = carray(at(store + slot * dim * size), dim, element)
                            for d in range(dim):
                                stored[d] = x[d]
                release(memory)
                add_done(at(counter + 16), taken)
                wait_until_done(counter + 16, num_rows)
            if call.parts & ATTEND:
                if layer.prefixes != 0:
                    call_at(layer.prefill, layer.prefixes)
                if layer.blocks != 0:
                    call_at(layer.prefill, layer.blocks)
                if layer.singles != 0:
                    call_at(layer.decode, layer.singles)
                _finish(layer.prefixes)
                _finish(layer.blocks)
                _finish(layer.singles)
            if call.parts & AFTER:
                o = carray(at(layer.o), 1, _matmul_call)[0]
                if o.x != call.attended or layer.shared != 0:
                    taken = 0
                    while True:
                        row = next_task(at(counter + 32))
                        if row >= num_rows:
                            break
                        taken += 1
                        attended = carray(at(call.attended + row * attended_size * 4), attended_size, np.float32)
                        if layer.shared != 0 and carray(at(layer.shared), num_rows, np.uint8)[row] != 0:
                            for head in range(num_heads):
                                place = (row * num_heads + head) * 4
                                lse = carray(at(call.lse + place), 1, np.float32)[0]
                                prefix_lse = carray(at(call.prefix_lse + place), 1, np.float32)[0]
                                prefix = carray(at(call.prefix_out + place * dim), dim, np.float32)
                                _join(attended[head * dim : (head + 1) * dim], prefix, lse, prefix_lse)
                        to = carray(at(o.x + row * o.x_row * 4), o.depth, np.float32)
                        for d in range(attended_size):
                            to[d] = rounded(attended[d], like)
                        for d in range(attended_size, o.depth):
                            to[d] = np.float32(0)
                    add_done(at(counter + 32), taken)
                    wait_until_done(counter + 32, num_rows)
                call_at(call.matmul, layer.o)
                _finish(layer.o)
                gate_up, down = (
                    carray(at(layer.gate_up), 1, _matmul_call)[0],
                    carray(at(layer.down), 1, _matmul_call)[0],
                )
                taken = 0
                while True:
                    row = next_task(at(counter + 48))
                    if row >= num_rows:
                        break
                    taken += 1
                    x = carray(at(call.x + row * hidden * size), hidden, element)
                    to = carray(at(gate_up.x + row * gate_up.x_row * 4), gate_up.depth, np.float32)
                    if layer.attention_norm != 0:
                        added = carray(at(layer.addend + row * hidden * size), hidden, element)
                        norm_row(to, added, layer.attention_norm, layer.wide, hidden, layer.attention_eps)
                        for d in range(hidden):
                            x[d] = narrow(widen(x[d]) + to[d], x)
                    norm_row(to, x, layer.mlp_norm, layer.wide, hidden, layer.mlp_eps)
                add_done(at(counter + 48), taken)
                wait_until_done(counter + 48, num_rows)
                if layer.mixture != 0:
                    call_at(layer.experts, layer.mixture)
                else:
                    call_at(call.matmul, layer.gate_up)
                    _finish(layer.gate_up)
                if layer.mixture == 0 and down.x != layer.gate:
                    taken = 0
                    while True:
                        row = next_task(at(counter + 64))
                        if row >= num_rows:
                            break
                        taken += 1
                        gate = carray(at(layer.gate + row * layer.gate_size * size), layer.gate_size, element)
                        copy_row(carray(at(down.x + row * down.x_row * 4), down.depth, np.float32), gate)
                    add_done(at(counter + 64), taken)
                    wait_until_done(counter + 64, num_rows)
                if layer.mixture == 0:
                    call_at(call.matmul, layer.down)
                    _finish(layer.down)
                if layer.output_norm != 0:
                    memory, taken = allocate(4 * hidden), 0
                    wide, _ = float_array(memory, (hidden,))
                    while True:
                        row = next_task(at(counter + 80))
                        if row >= num_rows:
                            break
                        taken += 1
                        x = carray(at(call.x + row * hidden * size), hidden, element)
                        added = carray(at(layer.addend + row * hidden * size), hidden, element)
                        norm_row(wide, added, layer.output_norm, layer.wide, hidden, layer.output_eps)
                        for d in range(hidden):
                            x[d] = narrow(widen(x[d]) + wide[d], x)
                    release(memory)
                    add_done(at(counter + 80), taken)
                    wait_until_done(counter + 80, num_rows)
            counter += PHASES * 16
        if call.head != 0:
            head, taken = carray(at(call.head), 1, _matmul_call)[0], 0
            while True:
                index = next_task(at(counter))
                if index >= call.num_wanted:
                    break
                taken += 1
                row = carray(at(call.wanted), call.num_wanted, np.int64)[index]
                x = carray(at(call.x + row * hidden * size), hidden, element)
                to = carray(at(head.x + index * head.x_row * 4), head.depth, np.float32)
                norm_row(to, x, call.norm, call.wide, hidden, call.eps)
            add_done(at(counter), taken)
            wait_until_done(counter, call.num_wanted)
            call_at(call.head_matmul, call.head)
            if call.tokens != 0:
                _finish(call.head)
                while True:
                    row = next_task(at(counter + 16))
                    if row >= num_rows:
                        break
                    logits = carray(at(head.out + row * head.out_row * size), head.out_row, element)
                    place = call.tokens + (call.steps_done * num_rows + row) * 8
                    carray(at(place), 1, np.int64)[0] = likeliest(logits)

    def work(pointer):
        call, turn = carray(pointer, 1)[0], 0
        while True:
            run_step(call)
            _meet(call.barrier)
            if is_first(call.turn, turn):
                _end_step(call, PHASES * call.num_layers + 2)
            turn += 1
            if turn == call.num_steps:
                break
            _meet(call.barrier)
            if call.steps_left == 0:
                break

    return compile_loop(LayersCall, work)
