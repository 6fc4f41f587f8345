"""Products of few rows with a weight on a CPU, outputs in registers: tiles of four rows, on torch's own threads."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from graftlm.kernels.cpu.loop_runtime import FLAGS, at, compiled, element_of, gated, narrow, rounded, take, widen

PANEL = 64
"""Outputs of one task: four vector registers of float32."""


class ProductCall(ctypes.Structure):
    """One product x W^T of few rows. Addresses; `x_row` and `out_row` in elements.

    x       float32 [num_rows, depth], zeros where W ends
    pieces  int64 [num_pieces, 6], the weights whose outputs lie side by side: their first task, outputs, first column
            of `out`, address, address of what their outputs are the gates of or 0, address of the bias or 0
    add     whether `out` is added to

    A weight lies in panels, or row by row: then `depth` is its inputs, a multiple of 16, and it has 4 outputs or more.
    """

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in (
            *("next_task", "num_tasks", "num_rows", "depth", "x", "x_row"),
            *("pieces", "num_pieces", "out", "out_row", "add"),
        )
    )


def _tile(num_rows: int, *, half: bool) -> Any:
    """C [num_rows, PANEL] = A [num_rows, depth] B, all of C in registers meanwhile. A and C are float32.

    B is a panel [depth, PANEL] of float32 or, if `half`, [depth / 2, PANEL, 2] of bfloat16.
    """

    @intrinsic
    def tile(typingctx: Any, c: Any, a: Any, a_row: Any, b: Any, depth: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
            c, a, a_row, b, depth = arguments
            word, single = ir.IntType(64), ir.FloatType()
            vector, bits = ir.VectorType(single, 16), ir.VectorType(ir.IntType(32), 16)
            zero = ir.Constant(vector, [0.0] * 16)
            first = ir.Constant(bits, [0] * 16)
            width = PANEL // 16
            steps = builder.lshr(depth, ir.Constant(word, 1)) if half else depth

            def at(base: Any, offset: Any, kind: Any) -> Any:
                return builder.inttoptr(builder.add(base, offset), kind.as_pointer())

            def splat(address: Any) -> Any:
                one = builder.insert_element(zero, builder.load(address, align=4), ir.Constant(ir.IntType(32), 0))
                return builder.shuffle_vector(one, zero, first)

            sums = [[cgutils.alloca_once(builder, vector) for _ in range(width)] for _ in range(num_rows)]
            for row in sums:
                for total in row:
                    builder.store(zero, total)
            with cgutils.for_range(builder, steps) as loop:
                offset = builder.mul(loop.index, ir.Constant(word, 4 * PANEL))
                kind = bits if half else vector
                lines = [
                    builder.load(at(b, builder.add(offset, ir.Constant(word, 64 * i)), kind), align=4)
                    for i in range(width)
                ]
                parts = [lines]
                if half:  # each 32 bits hold two inputs' weights of one output
                    low = [builder.shl(x, ir.Constant(bits, [16] * 16)) for x in lines]
                    high = [builder.and_(x, ir.Constant(bits, [0xFFFF0000] * 16)) for x in lines]
                    parts = [[builder.bitcast(x, vector) for x in part] for part in (low, high)]
                step = builder.mul(loop.index, ir.Constant(word, 4 * len(parts)))
                for i, row in enumerate(sums):
                    start = builder.add(step, builder.mul(a_row, ir.Constant(word, i)))
                    for j, part in enumerate(parts):
                        many = splat(at(a, builder.add(start, ir.Constant(word, 4 * j)), single))
                        for total, line in zip(row, part, strict=True):
                            product = builder.fmul(many, line, flags=("fast",))
                            builder.store(builder.fadd(builder.load(total), product, flags=("fast",)), total)
            for i, row in enumerate(sums):
                for j, total in enumerate(row):
                    place = at(c, ir.Constant(word, 4 * (i * PANEL + 16 * j)), vector)
                    builder.store(builder.load(total), place, align=4)

        integer = types.int64
        return types.void(integer, integer, integer, integer, integer), generate

    return tile


def _dots(num_rows: int, *, half: bool) -> Any:
    """C [num_rows, 4] = A [num_rows, depth] B^T, with B [4, depth] row by row; rows of C lie PANEL apart."""

    @intrinsic
    def dots(typingctx: Any, c: Any, a: Any, a_row: Any, b: Any, depth: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
            c, a, a_row, b, depth = arguments
            word, single, number = ir.IntType(64), ir.FloatType(), ir.IntType(32)
            vector, bits = ir.VectorType(single, 16), ir.VectorType(number, 16)
            zero = ir.Constant(vector, [0.0] * 16)
            size = 2 if half else 4
            b_row = builder.mul(depth, ir.Constant(word, size))

            def at(base: Any, offset: Any, kind: Any) -> Any:
                return builder.inttoptr(builder.add(base, offset), kind.as_pointer())

            def weight(address: Any) -> Any:
                if not half:
                    return builder.load(at(address, ir.Constant(word, 0), vector), align=4)
                found = builder.load(at(address, ir.Constant(word, 0), ir.VectorType(ir.IntType(16), 16)), align=2)
                return builder.bitcast(builder.shl(builder.zext(found, bits), ir.Constant(bits, [16] * 16)), vector)

            sums = [[cgutils.alloca_once(builder, vector) for _ in range(4)] for _ in range(num_rows)]
            for row in sums:
                for total in row:
                    builder.store(zero, total)
            with cgutils.for_range(builder, builder.lshr(depth, ir.Constant(word, 4))) as loop:
                step = builder.mul(loop.index, ir.Constant(word, 16 * size))
                lines = [
                    weight(builder.add(b, builder.add(step, builder.mul(b_row, ir.Constant(word, i)))))
                    for i in range(4)
                ]
                step = builder.mul(loop.index, ir.Constant(word, 64))
                for i, row in enumerate(sums):
                    place = at(a, builder.add(step, builder.mul(a_row, ir.Constant(word, i))), vector)
                    x = builder.load(place, align=4)
                    for total, line in zip(row, lines, strict=True):
                        product = builder.fmul(x, line, flags=("fast",))
                        builder.store(builder.fadd(builder.load(total), product, flags=("fast",)), total)
            for i, row in enumerate(sums):
                for j, total in enumerate(row):
                    value = builder.load(total)
                    for width in (8, 4, 2, 1):  # the upper half onto the lower one
                        order = [*range(width, 2 * width), *range(16 - width)][:16]
                        moved = builder.shuffle_vector(value, zero, ir.Constant(bits, order))
                        value = builder.fadd(value, moved, flags=("fast",))
                    found = builder.extract_element(value, ir.Constant(number, 0))
                    builder.store(found, at(c, ir.Constant(word, 4 * (i * PANEL + j)), single), align=4)

        integer = types.int64
        return types.void(integer, integer, integer, integer, integer), generate

    return dots


def _by_rows(*, half: bool) -> Any:
    """C [num_rows, PANEL] = A B, four rows at a time."""
    one, two, three, four = (_tile(num_rows, half=half) for num_rows in (1, 2, 3, 4))

    @njit(forceinline=True, **FLAGS)
    def product(c, a, a_row, b, num_rows, depth):
        for row in range(0, num_rows, 4):
            left = num_rows - row
            here, there = a + row * a_row, c + row * 4 * PANEL
            if left >= 4:
                four(there, here, a_row, b, depth)
            elif left == 3:
                three(there, here, a_row, b, depth)
            elif left == 2:
                two(there, here, a_row, b, depth)
            else:
                one(there, here, a_row, b, depth)

    return product


def _by_rows_plain(*, half: bool) -> Any:
    """The same for the next `num_out` rows, 4 to PANEL of them, of a weight that lies row by row."""
    one, two, four = (_dots(num_rows, half=half) for num_rows in (1, 2, 4))
    size = 2 if half else 4

    @njit(forceinline=True, **FLAGS)
    def product(c, a, a_row, b, num_rows, depth, num_out):
        for first in range(0, num_out, 4):
            column = min(first, num_out - 4)  # the last four once more, if there are not four left
            weight = b + column * depth * size
            row = 0
            while num_rows - row >= 4:
                four(c + (row * PANEL + column) * 4, a + row * a_row, a_row, weight, depth)
                row += 4
            if num_rows - row >= 2:
                two(c + (row * PANEL + column) * 4, a + row * a_row, a_row, weight, depth)
                row += 2
            if num_rows - row == 1:
                one(c + (row * PANEL + column) * 4, a + row * a_row, a_row, weight, depth)

    return product


# of the module, not of what compiles: what a loop closes over is part of the name that it is kept under
_product, _half_product = _by_rows(half=False), _by_rows(half=True)
_plain_product, _half_plain_product = _by_rows_plain(half=False), _by_rows_plain(half=True)


@functools.cache
def compile_plain_product(bfloat16: bool) -> int:
    """The same for one weight that lies row by row."""
    element, size = element_of(bfloat16)

    def work(pointer):
        call = carray(pointer, 1)[0]
        num_rows, depth = call.num_rows, call.depth
        pieces = carray(at(call.pieces), (1, 6), np.int64)
        sums = np.empty((num_rows, PANEL), np.float32)
        num_out, weight, bias = pieces[0, 1], pieces[0, 3], pieces[0, 5]
        while True:
            task = take(pointer)
            if task >= call.num_tasks:
                break
            first = min(task * PANEL, num_out - 4)
            width = min(PANEL, num_out - first)
            here = weight + first * depth * size
            if bfloat16:
                _half_plain_product(sums.ctypes.data, call.x, call.x_row * 4, here, num_rows, depth, width)
            else:
                _plain_product(sums.ctypes.data, call.x, call.x_row * 4, here, num_rows, depth, width)
            for row in range(num_rows):
                out = carray(at(call.out + (row * call.out_row + first) * size), width, element)
                if bias != 0:
                    added = carray(at(bias + first * size), width, element)
                    for j in range(width):
                        sums[row, j] += widen(added[j])
                for j in range(width):
                    out[j] = narrow(sums[row, j], out)

    return compiled(ProductCall, work)


@functools.cache
def compile_product(bfloat16: bool) -> int:
    """Address of `void (ProductCall *)`: works on tasks, a panel of outputs each, until none is left."""
    element, size = element_of(bfloat16)

    def work(pointer):
        call = carray(pointer, 1)[0]
        num_rows, depth = call.num_rows, call.depth
        pieces = carray(at(call.pieces), (call.num_pieces, 6), np.int64)
        sums, others = np.empty((num_rows, PANEL), np.float32), np.empty((num_rows, PANEL), np.float32)
        while True:
            task = take(pointer)
            if task >= call.num_tasks:
                break
            index = 0
            while index + 1 < call.num_pieces and task >= pieces[index + 1, 0]:
                index += 1
            first = (task - pieces[index, 0]) * PANEL
            width = min(PANEL, pieces[index, 1] - first)
            weight, second, bias = pieces[index, 3], pieces[index, 4], pieces[index, 5]
            offset = first * depth * size
            if bfloat16:
                _half_product(sums.ctypes.data, call.x, call.x_row * 4, weight + offset, num_rows, depth)
            else:
                _product(sums.ctypes.data, call.x, call.x_row * 4, weight + offset, num_rows, depth)
            if second != 0:
                if bfloat16:
                    _half_product(others.ctypes.data, call.x, call.x_row * 4, second + offset, num_rows, depth)
                else:
                    _product(others.ctypes.data, call.x, call.x_row * 4, second + offset, num_rows, depth)
            for row in range(num_rows):
                place = call.out + (row * call.out_row + pieces[index, 2] + first) * size
                out = carray(at(place), width, element)
                if bias != 0:
                    added = carray(at(bias + first * size), width, element)
                    for j in range(width):
                        sums[row, j] += widen(added[j])
                if second != 0:
                    for j in range(width):
                        sums[row, j] = gated(sums[row, j], others[row, j], out)
                if call.add != 0:
                    for j in range(width):
                        out[j] = narrow(rounded(sums[row, j], out) + widen(out[j]), out)
                else:
                    for j in range(width):
                        out[j] = narrow(sums[row, j], out)

    return compiled(ProductCall, work)
