"""Compiled code of decoder layers in steps of few tokens: any number of layers, or half of one, in one call.

Decoding is bound by reading weights, so all else has to be nearly free. Every thread runs the whole call. A layer is a
row of phases with barriers between them; in each phase a thread takes the next task until none is left. Products and
attention are loops of their own, called by their addresses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from graftlm.kernels.cpu.calls import AFTER, ATTEND, BEFORE, PHASES, LayerCall, LayersCall, MatmulCall
from graftlm.kernels.cpu.compiled.object_code import MachineCode
from graftlm.kernels.cpu.loops.arithmetic import (
    FLAGS,
    allocate,
    at,
    copy_row,
    element_of,
    exp,
    float_array,
    next_task,
    release,
    rms_norm,
    rotate,
    rounded,
    store_row,
)
from graftlm.kernels.cpu.loops.compiler import compile_loop


@intrinsic
def _call(typingctx: Any, function: Any, argument: Any) -> tuple[Any, Callable[..., Any]]:
    """Call the function at this address with this pointer; it may take none."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer]).as_pointer()
        builder.call(builder.inttoptr(arguments[0], kind), [builder.inttoptr(arguments[1], pointer)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@njit(forceinline=True, **FLAGS)
def _wait(barrier):
    if barrier != 0:
        _call(barrier, 0)


@njit(forceinline=True, **FLAGS)
def _join(to, prefix, lse, prefix_lse):
    """Join attention to a row's own keys, in `to`, with that to its prefix, for one head."""
    most = max(lse, prefix_lse)
    own, other = exp(lse - most), exp(prefix_lse - most)
    own, other = own / (own + other), other / (own + other)
    for d in range(len(to)):
        to[d] = to[d] * own + prefix[d] * other


def compile_decoder_layers(bfloat16: bool) -> MachineCode:
    """Compile `void (LayersCall *)`."""
    element, size = element_of(bfloat16)
    matmul, layer_call = np.dtype(MatmulCall), np.dtype(LayerCall)

    def work(pointer):
        call = carray(pointer, 1)[0]
        num_rows, hidden, barrier = call.num_rows, call.hidden_size, call.barrier
        layers = carray(at(call.layers), call.num_layers, layer_call)
        like = carray(at(call.x), hidden, element)
        counter = call.counters
        for index in range(call.num_layers):
            layer = layers[index]
            dim, num_heads, num_kv_heads = layer.head_dim, layer.num_heads, layer.num_kv_heads
            width, attended_size = num_heads + 2 * num_kv_heads, num_heads * dim
            if call.parts & BEFORE:
                qkv = carray(at(layer.qkv), 1, matmul)[0]
                while True:
                    row = next_task(at(counter))
                    if row >= num_rows:
                        break
                    x = carray(at(call.x + row * hidden * size), hidden, element)
                    if index == 0 and call.ids != 0:
                        token = carray(at(call.ids), num_rows, np.int64)[row]
                        embedded = carray(at(call.embedding + token * hidden * size), hidden, element)
                        for d in range(hidden):
                            x[d] = embedded[d]
                    to = carray(at(qkv.x + row * qkv.x_row * 4), qkv.depth, np.float32)
                    rms_norm(to, x, carray(at(layer.norm), hidden, element), hidden, layer.eps)
                _wait(barrier)
                _call(call.matmul, layer.qkv)
                _wait(barrier)
                memory = allocate(4 * dim)
                wide, _ = float_array(memory, (dim,))
                while True:
                    row = next_task(at(counter + 8))
                    if row >= num_rows:
                        break
                    place = carray(at(call.positions), num_rows, np.int64)[row] * call.table_row * size
                    cos = carray(at(call.cos + place), call.rotary_dim, element)
                    sin = carray(at(call.sin + place), call.rotary_dim, element)
                    for head in range(width):
                        x = carray(at(layer.qkv_out + (row * width + head) * dim * size), dim, element)
                        if head < num_heads + num_kv_heads:
                            norm = layer.q_norm if head < num_heads else layer.k_norm
                            if norm != 0:
                                rms_norm(wide, x, carray(at(norm), dim, element), dim, layer.head_eps)
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
                _wait(barrier)
            if call.parts & ATTEND:
                if layer.prefixes != 0:
                    _call(layer.prefill, layer.prefixes)
                if layer.blocks != 0:
                    _call(layer.prefill, layer.blocks)
                if layer.singles != 0:
                    _call(layer.decode, layer.singles)
                _wait(barrier)
            if call.parts & AFTER:
                o = carray(at(layer.o), 1, matmul)[0]
                if o.x != call.attended or layer.shared != 0:
                    while True:
                        row = next_task(at(counter + 16))
                        if row >= num_rows:
                            break
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
                    _wait(barrier)
                _call(call.matmul, layer.o)
                _wait(barrier)
                gate_up, down = carray(at(layer.gate_up), 1, matmul)[0], carray(at(layer.down), 1, matmul)[0]
                while True:
                    row = next_task(at(counter + 24))
                    if row >= num_rows:
                        break
                    x = carray(at(call.x + row * hidden * size), hidden, element)
                    to = carray(at(gate_up.x + row * gate_up.x_row * 4), gate_up.depth, np.float32)
                    rms_norm(to, x, carray(at(layer.mlp_norm), hidden, element), hidden, layer.mlp_eps)
                _wait(barrier)
                _call(call.matmul, layer.gate_up)
                _wait(barrier)
                if down.x != layer.gate:
                    while True:
                        row = next_task(at(counter + 32))
                        if row >= num_rows:
                            break
                        gate = carray(at(layer.gate + row * layer.gate_size * size), layer.gate_size, element)
                        copy_row(carray(at(down.x + row * down.x_row * 4), down.depth, np.float32), gate)
                    _wait(barrier)
                _call(call.matmul, layer.down)
                _wait(barrier)
            counter += PHASES * 8
        if call.head != 0:
            head = carray(at(call.head), 1, matmul)[0]
            while True:
                index = next_task(at(counter))
                if index >= call.num_wanted:
                    break
                row = carray(at(call.wanted), call.num_wanted, np.int64)[index]
                x = carray(at(call.x + row * hidden * size), hidden, element)
                to = carray(at(head.x + index * head.x_row * 4), head.depth, np.float32)
                rms_norm(to, x, carray(at(call.norm), hidden, element), hidden, call.eps)
            _wait(barrier)
            _call(call.head_matmul, call.head)

    return compile_loop(LayersCall, work)
