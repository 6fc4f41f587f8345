"""Compiled loops of quantised panels: the matmul of one panel, and the gather of single outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit

from graftlm.kernels.cpu import PANEL
from graftlm.kernels.cpu.calls import GatherCall, PanelCall
from graftlm.kernels.cpu.compiled.object_code import MachineCode
from graftlm.kernels.cpu.element_format import ElementFormat
from graftlm.kernels.cpu.loops.arithmetic import FLAGS, add_done, at, from_bits, narrow, next_task
from graftlm.kernels.cpu.loops.compiler import compile_loop
from graftlm.kernels.cpu.loops.quantised_amx import amx_panel
from graftlm.kernels.cpu.loops.quantised_tiles import NEAR, quantised_tile
from graftlm.kernels.cpu.loops.register_tiles import has
from graftlm.kernels.cpu.panel_kind import INPUTS, POSITIONS, TABLE, Arithmetic, Numbers, PanelKind

_MOST_ROWS = 4
"""Rows of a register tile: with a panel's four vectors, 16 sums of a block and 16 decoded or scaled vectors."""
_LEAST_TILE_ROWS = 4
"""The least rows for which AMX tiles are faster: a tile costs the decoding of its codes."""


def compile_quantised_panel(arithmetic: int, *arguments: int) -> MachineCode:
    """Compile `void (PanelCall *)` for the kind with these arguments."""
    kind = PanelKind.of(*arguments)
    by_tiles = arithmetic == Arithmetic.DOTS and has("amx-bf16")
    tiles: Any = amx_panel(kind) if by_tiles else None
    # processors with AMX tiles are slow at other dot products of bfloat16
    of_few = Arithmetic.FLOATS if by_tiles else Arithmetic(arithmetic)
    # a pass over half of the outputs has registers for the sums of eight rows, which share the work of decoding
    by_eight = kind.bits == 8 and of_few is Arithmetic.DOTS
    eight: Any = quantised_tile(8, of_few, kind, num_passes=2) if by_eight else None
    one, two, three, four = (quantised_tile(rows + 1, of_few, kind, widens=by_tiles) for rows in range(_MOST_ROWS))

    def work(pointer):
        call = carray(pointer, 1)[0]
        x_row, sums_row, num_blocks = call.x_row, call.sums_row, call.num_blocks
        panel, table = call.panel, call.table
        if by_tiles and call.num_rows >= _LEAST_TILE_ROWS:
            tiles(call.out, call.x, x_row, call.sums, sums_row, panel, table, num_blocks, call.num_rows)
            return
        done = 0
        while by_eight and call.num_rows - done >= 8:
            out, x = call.out + done * 4 * PANEL, call.x + done * x_row
            sums, scales = call.sums + 4 * done * sums_row, call.scales + 4 * done * sums_row
            ahead = call.ahead if done == 0 else NEAR
            eight(out, x, x_row, sums, scales, sums_row, panel, table, num_blocks, ahead)
            done += 8
        for row in range(done, call.num_rows, _MOST_ROWS):
            # the second tile finds its codes in the cache, and meanwhile reads those of the next panel
            ahead = call.ahead if row == _MOST_ROWS else NEAR
            left = call.num_rows - row
            out, x = call.out + row * 4 * PANEL, call.x + row * x_row
            sums, scales = call.sums + 4 * row * sums_row, call.scales + 4 * row * sums_row
            if left >= 4:
                four(out, x, x_row, sums, scales, sums_row, panel, table, num_blocks, ahead)
            elif left == 3:
                three(out, x, x_row, sums, scales, sums_row, panel, table, num_blocks, ahead)
            elif left == 2:
                two(out, x, x_row, sums, scales, sums_row, panel, table, num_blocks, ahead)
            else:
                one(out, x, x_row, sums, scales, sums_row, panel, table, num_blocks, ahead)

    return compile_loop(PanelCall, work)


_PLACES = tuple(POSITIONS.index(i) for i in range(INPUTS))
"""Nibble of a word of each of 8 inputs."""


@njit(forceinline=True, **FLAGS)
def _half(bits):
    """Return the float32 of a float16's bits."""
    sign, magnitude = np.int32(bits) >> np.int32(15), np.int32(bits) & np.int32(0x7FFF)
    if magnitude < np.int32(0x400):  # a subnormal number
        value = np.float32(magnitude) * np.float32(2.0**-24)
    else:
        value = from_bits((magnitude << np.int32(13)) + np.int32(112 << 23))
    return -value if sign != 0 else value


@njit(forceinline=True, **FLAGS)
def _e4m3(code):
    magnitude = (np.int32(code) & np.int32(0x7F)) << np.int32(20)
    value = from_bits(magnitude) * np.float32(2.0**120)
    return -value if np.int32(code) & np.int32(0x80) else value


def compile_quantised_gather(number: int, *arguments: int) -> MachineCode:
    """Compile `void (GatherCall *)` for outputs of the kind with these arguments, in elements of format `number`."""
    element, size = ElementFormat(number).raw, ElementFormat(number).size
    kind = PanelKind.of(*arguments)
    block_inputs, block_bytes, codes_bytes, line_bytes = kind.block, kind.block_bytes, kind.codes_bytes, kind.line_bytes
    four_bits, six_bits, has_minimum, has_table = kind.bits == 4, kind.bits == 6, kind.minimum, kind.table
    line_inputs = kind.line
    number_size, span, factor_bytes = kind.numbers.size, kind.span, kind.factor_bytes
    is_half, is_whole = kind.numbers is Numbers.FLOAT16, kind.numbers is Numbers.INT8
    floats, places = TABLE.FLOATS, _PLACES

    @njit(forceinline=True, **FLAGS)
    def number_at(address):
        if is_whole:
            return np.float32(carray(at(address), 1, np.int8)[0])
        return _half(carray(at(address), 1, np.uint16)[0]) if is_half else carray(at(address), 1, np.float32)[0]

    def work(pointer):
        call, taken = carray(pointer, 1)[0], 0
        values = carray(at(call.table + floats), 16, np.float32)
        while True:
            task = next_task(pointer)
            if task >= call.num_tasks:
                break
            taken += 1
            output = carray(at(call.ids), call.num_tasks, np.int64)[task]
            lane = output % PANEL
            block = call.weight + output // PANEL * call.panel_bytes
            out = carray(at(call.out + task * call.depth * size), call.depth, element)
            factors = block
            for first in range(0, call.depth, block_inputs):
                if is_whole and first % span == 0:
                    factors = block + 2 * lane
                    block += factor_bytes
                numbers = block + codes_bytes + lane * number_size
                scale, minimum = number_at(numbers), np.float32(0)
                if has_minimum:
                    minimum = number_at(numbers + PANEL * number_size)
                if is_whole:
                    scale *= _half(carray(at(factors), 1, np.uint16)[0])
                if is_whole and has_minimum:
                    minimum *= _half(carray(at(factors + 2 * PANEL), 1, np.uint16)[0])
                for i in range(block_inputs):
                    line, place = block + i // line_inputs * line_bytes, places[i % 8]
                    if four_bits:
                        word = carray(at(line + 4 * lane), 1, np.uint32)[0]
                        value = values[(word >> np.uint32(4 * place)) & np.uint32(15)]
                    elif six_bits:
                        part, byte = i % 16 // 8 * 2 + place % 2, line + 4 * lane + place // 2
                        if part < 3:
                            code = np.int32(carray(at(byte + part * 4 * PANEL), 1, np.uint8)[0]) & np.int32(63)
                        else:
                            code = np.int32(0)
                            for j in range(3):
                                upper = np.int32(carray(at(byte + j * 4 * PANEL), 1, np.uint8)[0]) >> np.int32(6)
                                code |= upper << np.int32(2 * j)
                        value = np.float32(code) + values[0]
                    else:
                        # bytes lie as the nibbles of a word: the even nibbles in a first word, the odd ones in another
                        byte = line + place % 2 * 4 * PANEL + 4 * lane + place // 2
                        if has_table:
                            value = _e4m3(carray(at(byte), 1, np.uint8)[0])
                        else:
                            value = np.float32(carray(at(byte), 1, np.int8)[0])
                    out[first + i] = narrow(value * scale + minimum, out)
                block += block_bytes
        add_done(pointer, taken)

    return compile_loop(GatherCall, work)
