"""Elementwise loops of a decoder layer on a CPU, for many tokens: norm, rotary embedding, gate."""

from __future__ import annotations

from numba import carray

from graftlm.kernels.cpu.calls import GateMulCall, NormCall, RotationCall
from graftlm.kernels.cpu.compiled.object_code import MachineCode
from graftlm.kernels.cpu.element_format import ElementFormat
from graftlm.kernels.cpu.loops.arithmetic import (
    allocate,
    at,
    copy_row,
    float_array,
    gelu_mul,
    narrow,
    next_task,
    norm_row,
    release,
    rotate,
    silu_mul,
    store_row,
    widen,
)
from graftlm.kernels.cpu.loops.compiler import compile_loop

_ROWS = 4
"""Rows of a task."""


def compile_norm(number: int) -> MachineCode:
    element, size = ElementFormat(number).raw, ElementFormat(number).size

    def work(pointer):
        call = carray(pointer, 1)[0]
        num = call.size
        memory = allocate(4 * num)
        wide, _ = float_array(memory, (num,))
        while True:
            first = next_task(pointer) * _ROWS
            if first >= call.num_rows:
                break
            for row in range(first, min(first + _ROWS, call.num_rows)):
                x = carray(at(call.x + row * num * size), num, element)
                if call.added != 0:
                    added = carray(at(call.added + row * call.added_row * size), num, element)
                    if call.added_norm != 0:
                        norm_row(wide, added, call.added_norm, call.wide, num, call.added_eps)
                        for d in range(num):
                            x[d] = narrow(widen(x[d]) + wide[d], x)
                    else:
                        for d in range(num):
                            x[d] = narrow(widen(x[d]) + widen(added[d]), x)
                if call.weight != 0:
                    norm_row(wide, x, call.weight, call.wide, num, call.eps)
                    out = carray(at(call.out + row * call.out_row * size), num, element)
                    store_row(out, wide)
        release(memory)

    return compile_loop(NormCall, work)


def compile_rotation(number: int) -> MachineCode:
    element, size = ElementFormat(number).raw, ElementFormat(number).size

    def work(pointer):
        call = carray(pointer, 1)[0]
        dim, half = call.head_dim, call.rotary_dim // 2
        memory = allocate(4 * dim)
        wide, _ = float_array(memory, (dim,))
        while True:
            first = next_task(pointer) * _ROWS
            if first >= call.num_rows:
                break
            for row in range(first, min(first + _ROWS, call.num_rows)):
                cos = carray(at(call.cos + row * call.table_row * size), call.rotary_dim, element)
                sin = carray(at(call.sin + row * call.table_row * size), call.rotary_dim, element)
                for head in range(call.num_heads + call.num_kv_heads):
                    if head < call.num_heads:
                        place, norm = call.q + (row * call.q_row + head * dim) * size, call.q_norm
                    else:
                        place = call.k + (row * call.k_row + (head - call.num_heads) * dim) * size
                        norm = call.k_norm
                    x = carray(at(place), dim, element)
                    if norm != 0:
                        norm_row(wide, x, norm, call.wide, dim, call.eps)
                        store_row(x, wide)
                    rotate(x, cos, sin, half)
        release(memory)

    return compile_loop(RotationCall, work)


def compile_gate_mul(number: int) -> MachineCode:
    element, size = ElementFormat(number).raw, ElementFormat(number).size

    def work(pointer):
        call = carray(pointer, 1)[0]
        num = call.size
        memory = allocate(4 * num)
        wide, _ = float_array(memory, (num,))
        while True:
            first = next_task(pointer) * _ROWS
            if first >= call.num_rows:
                break
            for row in range(first, min(first + _ROWS, call.num_rows)):
                copy_row(wide, carray(at(call.gate + row * call.row * size), num, element))
                up = carray(at(call.up + row * call.row * size), num, element)
                out = carray(at(call.out + row * call.out_row * size), num, element)
                if call.gelu != 0:
                    for d in range(num):
                        out[d] = narrow(gelu_mul(wide[d], widen(up[d]), out), out)
                else:
                    for d in range(num):
                        out[d] = narrow(silu_mul(wide[d], widen(up[d]), out), out)
        release(memory)

    return compile_loop(GateMulCall, work)
