"""Skinny matmuls on a CPU: x [num_rows, k] times a weight [n, k], for few rows, as compiled loops.

Decoding is bound by reading weights. A task is 64 outputs; for tiles of up to six rows their sums stay in registers, so
each weight is loaded once per tile. Bias, gate and residual sum are part of the loop.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit

from graftlm.kernels.cpu import PANEL
from graftlm.kernels.cpu.calls import HALVES, SEGMENT, MatmulCall
from graftlm.kernels.cpu.compiled.object_code import MachineCode
from graftlm.kernels.cpu.element_format import ElementFormat
from graftlm.kernels.cpu.loops.arithmetic import (
    FLAGS,
    add_done,
    allocate,
    at,
    float_array,
    gelu_mul,
    narrow,
    next_task,
    release,
    rounded,
    silu_mul,
    store_row,
    widen,
)
from graftlm.kernels.cpu.loops.compiler import compile_loop
from graftlm.kernels.cpu.loops.quantised_rows import panel_matmul, quantised_rows
from graftlm.kernels.cpu.loops.register_tiles import (
    has_bfloat16_dots,
    has_wide_registers,
    inner_dot_tile,
    inner_tile,
    outer_dot_tile,
    outer_tile,
)


def dense_panel_matmul(element: ElementFormat) -> Any:
    """Return the function C [num_rows, PANEL] = A B for one panel B, some rows at a time; `num_out` is ignored.

    The sums of six rows fill the registers of AVX-512; four rows if elements are widened, which also needs registers.
    Other processors have at most half as many: four rows of float32 use 16 columns at a time, two rows of any format 32
    columns. (Four rows of bfloat16 by 16 columns would fit, but LLVM 20 compiles that tile to code which never stores
    its first row.)
    """
    if not has_wide_registers():
        return _narrow_panel_matmul(element)
    tiles = [outer_tile(num_rows, PANEL // 16, b=element) for num_rows in range(1, 7)]
    one, two, three, four, five, six = tiles
    most = 6 if element is ElementFormat.FLOAT32 else 4

    @njit(forceinline=True, **FLAGS)
    def matmul(c, a, a_row, b, num_rows, depth, num_out):
        for row in range(0, num_rows, most):
            left = num_rows - row
            here, there = a + row * a_row, c + row * 4 * PANEL
            if most == 6 and left >= 6:
                six(there, here, a_row, 4, b, depth)
            elif most == 6 and left == 5:
                five(there, here, a_row, 4, b, depth)
            elif left >= 4:
                four(there, here, a_row, 4, b, depth)
            elif left == 3:
                three(there, here, a_row, 4, b, depth)
            elif left == 2:
                two(there, here, a_row, 4, b, depth)
            else:
                one(there, here, a_row, 4, b, depth)

    return matmul


def _dot_matmul() -> Any:
    """Return `dense_panel_matmul` for bfloat16 rows times a bfloat16 panel, six rows at a time."""
    tiles = [outer_dot_tile(num_rows, PANEL // 16) for num_rows in range(1, 7)]
    one, two, three, four, five, six = tiles

    @njit(forceinline=True, **FLAGS)
    def matmul(c, a, a_row, b, num_rows, depth):
        for row in range(0, num_rows, 6):
            left = num_rows - row
            here, there = a + row * a_row, c + row * 4 * PANEL
            if left >= 6:
                six(there, here, a_row, 4, b, depth)
            elif left == 5:
                five(there, here, a_row, 4, b, depth)
            elif left == 4:
                four(there, here, a_row, 4, b, depth)
            elif left == 3:
                three(there, here, a_row, 4, b, depth)
            elif left == 2:
                two(there, here, a_row, 4, b, depth)
            else:
                one(there, here, a_row, 4, b, depth)

    return matmul


def _narrow_panel_matmul(element: ElementFormat) -> Any:
    one, two, four = (outer_tile(rows, width, b=element) for rows, width in ((1, 4), (2, 2), (4, 1)))
    most = 4 if element is ElementFormat.FLOAT32 else 2

    @njit(forceinline=True, **FLAGS)
    def matmul(c, a, a_row, b, num_rows, depth, num_out):
        row = 0
        while most == 4 and num_rows - row >= 4:
            for place in range(0, 4 * PANEL, 64):
                four(c + row * 4 * PANEL + place, a + row * a_row, a_row, 4, b + place, depth)
            row += 4
        while num_rows - row >= 2:
            for place in range(0, 4 * PANEL, 128):
                two(c + row * 4 * PANEL + place, a + row * a_row, a_row, 4, b + place, depth)
            row += 2
        if row < num_rows:
            one(c + row * 4 * PANEL, a + row * a_row, a_row, 4, b, depth)

    return matmul


def row_major_matmul(element: ElementFormat, *, dots: bool = False) -> Any:
    """Return the matmul with the next `num_out` rows, 4 to PANEL, of a row-major weight; `dots`: of bfloat16 rows."""
    one, two, four = (inner_dot_tile(num_rows) if dots else inner_tile(num_rows, element) for num_rows in (1, 2, 4))
    size = element.size
    wide = has_wide_registers()

    @njit(forceinline=True, **FLAGS)
    def matmul(c, a, a_row, b, num_rows, depth, num_out):
        for first in range(0, num_out, 4):
            column = min(first, num_out - 4)  # with fewer than four left, some outputs are computed twice
            weight = b + column * depth * size
            row = 0
            while wide and num_rows - row >= 4:
                four(c + (row * PANEL + column) * 4, a + row * a_row, a_row, weight, depth)
                row += 4
            if wide and num_rows - row >= 2:
                two(c + (row * PANEL + column) * 4, a + row * a_row, a_row, weight, depth)
                row += 2
            while num_rows - row >= 1:
                one(c + (row * PANEL + column) * 4, a + row * a_row, a_row, weight, depth)
                row += 1

    return matmul


dot_panel_matmul = _dot_matmul()
_row_major_dots = row_major_matmul(ElementFormat.BFLOAT16, dots=True)


def compile_matmul(number: int, row_major: bool = False) -> MachineCode:
    """Compile `void (MatmulCall *)` for weights of format `number`, in panels or row-major."""
    weight_format = ElementFormat(number)
    element, size = weight_format.raw, weight_format.size
    dots = weight_format is ElementFormat.BFLOAT16 and has_bfloat16_dots()
    matmul = row_major_matmul(weight_format) if row_major else dense_panel_matmul(weight_format)
    quantised = not row_major

    def work(pointer):
        call = carray(pointer, 1)[0]
        num_rows, depth, x, x_row = call.num_rows, call.depth, call.x, call.x_row * 4
        task_rows = call.task_rows if call.task_rows != 0 else num_rows
        parts = (num_rows + task_rows - 1) // task_rows
        segments = carray(at(call.segments), (call.num_segments, SEGMENT), np.int64)
        narrows = call.x_bfloat16 == 0 and (dots if call.forms == 0 else call.forms & HALVES != 0)
        memory = allocate(8 * task_rows * PANEL + (2 * num_rows * depth if narrows else 0))
        sums, other = float_array(memory, (task_rows, PANEL))
        ups, halves = float_array(other, (task_rows, PANEL))
        halves_row = 2 * depth
        if call.x_bfloat16 != 0:
            halves, halves_row = x, 2 * call.x_row
        if narrows:
            for row in range(num_rows):
                half_row = carray(at(halves + 2 * row * depth), depth, np.uint16)
                store_row(half_row, carray(at(x + row * x_row), depth, np.float32))
        rows = 0
        if quantised and call.forms != 0:
            rows = quantised_rows(call, halves, halves_row)
        taken, last = 0, -1
        while True:
            task = next_task(pointer)
            if task >= call.num_tasks:
                break
            taken += 1
            panel, first_row, index = task // parts, task % parts * task_rows, 0
            step, last = max(panel - last, 1), panel  # with n threads, n panels
            here = min(task_rows, num_rows - first_row)
            while index + 1 < call.num_segments and panel >= segments[index + 1, 0]:
                index += 1
            first, num_out = (panel - segments[index, 0]) * PANEL, segments[index, 1]
            if row_major:
                first = min(first, num_out - 4)
            width = min(PANEL, num_out - first)
            weight, up, bias = segments[index, 3], segments[index, 4], segments[index, 5]
            offset = first * depth * size
            some, some_halves = x + first_row * x_row, halves + first_row * halves_row
            if quantised and segments[index, 6] != 0:
                place = first // PANEL
                panel_matmul(rows, memory, segments[index, 3], segments[index, 6:11], place, step, first_row, here)
                if up != 0:
                    panel_matmul(rows, other, up, segments[index, 11:16], place, step, first_row, here)
            elif row_major:
                if dots and depth % 32 == 0:
                    _row_major_dots(memory, some_halves, halves_row, weight + offset, here, depth, width)
                else:
                    matmul(memory, some, x_row, weight + offset, here, depth, width)
            elif dots:
                dot_panel_matmul(memory, some_halves, halves_row, weight + offset, here, depth)
                if up != 0:
                    dot_panel_matmul(other, some_halves, halves_row, up + offset, here, depth)
            else:
                matmul(memory, some, x_row, weight + offset, here, depth, width)
                if up != 0:
                    matmul(other, some, x_row, up + offset, here, depth, width)
            for row in range(here):
                place = call.out + ((first_row + row) * call.out_row + segments[index, 2] + first) * size
                out = carray(at(place), width, element)
                if bias != 0:
                    added = carray(at(bias + first * size), width, element)
                    for j in range(width):
                        sums[row, j] += widen(added[j])
                if up != 0 and call.gelu != 0:
                    for j in range(width):
                        sums[row, j] = gelu_mul(sums[row, j], ups[row, j], out)
                elif up != 0:
                    for j in range(width):
                        sums[row, j] = silu_mul(sums[row, j], ups[row, j], out)
                if call.add != 0:
                    for j in range(width):
                        out[j] = narrow(rounded(sums[row, j], out) + widen(out[j]), out)
                else:
                    store_row(out, sums[row])
        add_done(pointer, taken)
        if rows != 0:
            release(rows)
        release(memory)

    return compile_loop(MatmulCall, work)
