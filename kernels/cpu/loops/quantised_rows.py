"""Rows in the forms that loops of quantised panels read, and the call of such a loop by a matmul."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from graftlm.kernels.cpu.calls import FLOAT_ROWS, INT8_ROWS, SUMS, PanelCall
from graftlm.kernels.cpu.loops.arithmetic import FLAGS, allocate, at, call_at, widen
from graftlm.kernels.cpu.panel_kind import FOURS, INPUTS, Arithmetic

GROUP = 32
"""Inputs of a sum, and of a scale of int8."""

_ROUNDER = 1.5 * 2.0**23
"""Float32 whose sum with a small number has the rounded number in its lowest bits."""
_LEAST = 1e-30
"""Least maximum of a group that has a scale; all inputs of a smaller one are 0."""


@intrinsic
def _quantise(typingctx: Any, x: Any, whole: Any, scale: Any, total: Any) -> tuple[Any, Callable[..., Any]]:
    """Round GROUP float32 at an address to int8 in the order of FOURS, and store their scale and sum at addresses."""
    number, single, byte = ir.IntType(32), ir.FloatType(), ir.IntType(8)
    floats, numbers = ir.VectorType(single, GROUP), ir.VectorType(number, GROUP)
    order = [first + i for first in range(0, GROUP, INPUTS) for four in FOURS for i in four]

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def place(index: int, kind: Any) -> Any:
            return builder.inttoptr(arguments[index], kind.as_pointer())

        def function(name: str, result: Any, argument: Any) -> Any:
            return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, [argument]), name)

        x = builder.load(place(0, floats), align=4)
        size = builder.call(function("llvm.fabs.v32f32", floats, floats), [x])
        top = builder.call(function("llvm.vector.reduce.fmax.v32f32", single, floats), [size], fastmath=("fast",))
        scale = builder.fmul(top, ir.Constant(single, float(np.float32(1 / 127))))
        inverse = builder.fdiv(ir.Constant(single, 127.0), top)
        is_large = builder.fcmp_ordered(">", top, ir.Constant(single, float(np.float32(_LEAST))))
        inverse = builder.select(is_large, inverse, ir.Constant(single, 0.0))
        builder.store(builder.select(is_large, scale, ir.Constant(single, 0.0)), place(2, single), align=4)
        one = builder.insert_element(ir.Constant(floats, ir.Undefined), inverse, ir.Constant(number, 0))
        factors = builder.shuffle_vector(one, ir.Constant(floats, ir.Undefined), ir.Constant(numbers, [0] * GROUP))
        moved = builder.fadd(builder.fmul(x, factors), ir.Constant(floats, [_ROUNDER] * GROUP))
        found = builder.sub(builder.bitcast(moved, numbers), ir.Constant(numbers, [0x4B400000] * GROUP))
        total = builder.call(function("llvm.vector.reduce.add.v32i32", number, numbers), [found])
        builder.store(total, place(3, number), align=4)
        found = builder.trunc(found, ir.VectorType(byte, GROUP))
        found = builder.shuffle_vector(found, found, ir.Constant(numbers, order))
        builder.store(found, place(1, found.type), align=1)
        return context.get_dummy_value()

    return types.void(x, whole, scale, total), generate


_panel_call = np.dtype(PanelCall)
_CALL_BYTES = -(-ctypes.sizeof(PanelCall) // 64) * 64


class RowsCall(ctypes.Structure):
    """Prepared rows at the start of memory that a PanelCall follows: addresses, and bytes or numbers of a row."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in ("x", "x_row", "halves", "halves_row", "whole", "scales", "totals", "sums", "groups", "depth")
    ]


_rows_call = np.dtype(RowsCall)
_HEAD_BYTES = -(-ctypes.sizeof(RowsCall) // 64) * 64


@njit(forceinline=True, **FLAGS)
def quantised_rows(call, halves, halves_row):
    """Prepare the rows of a MatmulCall in its `forms`. -> address of memory that the caller releases

    halves  address of the rows in bfloat16, `halves_row` bytes apart, if there are any
    """
    num_rows, depth = call.num_rows, call.depth
    groups = depth // GROUP
    numbers, whole_bytes = 4 * num_rows * groups, (num_rows * depth + 63) // 64 * 64
    size = _HEAD_BYTES + _CALL_BYTES
    is_int8, has_sums = call.forms & INT8_ROWS != 0, call.forms & SUMS != 0
    keeps = call.x_bfloat16 != 0 and call.forms & FLOAT_ROWS != 0
    if is_int8:
        size += whole_bytes + 2 * numbers
    if has_sums:
        size += numbers
    memory = allocate(size + 4 * depth * (num_rows if keeps else 1))
    rows = carray(at(memory), 1, _rows_call)[0]
    rows.x, rows.x_row, rows.halves, rows.halves_row = call.x, 4 * call.x_row, halves, halves_row
    rows.groups, rows.depth = groups, depth
    place = memory + _HEAD_BYTES + _CALL_BYTES
    rows.whole, rows.scales, rows.totals = place, place + whole_bytes, place + whole_bytes + numbers
    if is_int8:
        place += whole_bytes + 2 * numbers
    rows.sums = place
    if has_sums:
        place += numbers
    if keeps:
        rows.x, rows.x_row = place, 4 * depth
    for row in range(num_rows):
        source = call.x + row * call.x_row * 4
        if call.x_bfloat16 != 0:
            source = place
            x, wide = carray(at(call.x + row * call.x_row * 2), depth, np.uint16), carray(at(place), depth, np.float32)
            for d in range(depth):
                wide[d] = widen(x[d])
            if keeps:
                place += 4 * depth
        if is_int8:
            for group in range(groups):
                number = 4 * (row * groups + group)
                _quantise(
                    source + 4 * GROUP * group, rows.whole + row * depth + GROUP * group, rows.scales + number,
                    rows.totals + number,
                )  # fmt: skip
        if has_sums:
            sums = carray(at(rows.sums + 4 * row * groups), groups, np.float32)
            x = carray(at(source), depth, np.float32)
            for group in range(groups):
                total = np.float32(0)
                for d in range(group * GROUP, (group + 1) * GROUP):
                    total += x[d]
                sums[group] = total
    return memory


_FLOATS, _DOTS = int(Arithmetic.FLOATS), int(Arithmetic.DOTS)


@njit(forceinline=True, **FLAGS)
def panel_matmul(memory, out, weight, loop, panel, step, first_row, num_rows):
    """Multiply rows of `quantised_rows` by a panel of a weight. -> out, the address of float32 [num_rows, PANEL]

    loop  its address, bytes of a panel, address of the table, arithmetic and inputs of a block, as in a segment
    step  the number of panels from this one to the thread's probable next
    """
    rows = carray(at(memory), 1, _rows_call)[0]
    call = carray(at(memory + _HEAD_BYTES), 1, _panel_call)[0]
    call.out, call.num_rows = out, num_rows
    call.panel, call.table, call.num_blocks = weight + panel * loop[1], loop[2], rows.depth // loop[4]
    call.sums_row, call.ahead = rows.groups, step * loop[1]
    if loop[3] == _FLOATS:
        call.x, call.x_row = rows.x + first_row * rows.x_row, rows.x_row
        call.sums = rows.sums + 4 * first_row * rows.groups
    elif loop[3] == _DOTS:
        call.x, call.x_row = rows.halves + first_row * rows.halves_row, rows.halves_row
        call.sums = rows.sums + 4 * first_row * rows.groups
    else:
        call.x, call.x_row = rows.whole + first_row * rows.depth, rows.depth
        call.sums, call.scales = rows.totals + 4 * first_row * rows.groups, rows.scales + 4 * first_row * rows.groups
    call_at(loop[0], memory + _HEAD_BYTES)
