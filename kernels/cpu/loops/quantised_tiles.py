"""The innermost loops of matmuls with quantised panels, as LLVM instructions: codes are decoded in vector registers.

Outputs are lanes, and inputs are broadcast from memory by the instruction that multiplies them: broadcasts in registers
would leave too few for the sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from graftlm.kernels.cpu import PANEL
from graftlm.kernels.cpu.loops.register_tiles import (
    BITS,
    FLOATS,
    address,
    constant,
    has,
    has_wide_registers,
    prefetch,
    spread,
)
from graftlm.kernels.cpu.panel_kind import FOURS, INPUTS, POSITIONS, TABLE, Arithmetic, Numbers, PanelKind

_BYTE, _HALF, _NUMBER, _WORD = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_SINGLE, _FLOAT16 = ir.FloatType(), ir.HalfType()
_LANES = 16
_VECTORS = PANEL // _LANES
_FAST = ("fast",)
_INTEGER_SCALE = 2.0**-24
"""Factor of the 8-bit integers that `_left_aligned` converts in the upper byte of a word."""
NEAR = 4096
"""Bytes that a tile prefetches ahead of its own reads: a fifth of the time of one row, which memory limits."""
_E4M3_SCALE = 2.0**120
"""Factor of e4m3 codes whose bits are those of a float32 with an exponent of 8 bits."""


def _vector(kind: Any, length: int) -> Any:
    return ir.VectorType(kind, length)


def _all(kind: Any, length: int, value: Any) -> Any:
    return ir.Constant(_vector(kind, length), [value] * length)


def _bits(value: int) -> Any:
    return _all(_NUMBER, _LANES, value)


class Decoder:
    """The decoding of a kind's codes for one arithmetic.

    table  address of the weight's table
    """

    def __init__(self, builder: Any, arithmetic: Arithmetic, kind: PanelKind, table: Any) -> None:
        self.builder, self.kind, self.arithmetic, self.table = builder, kind, arithmetic, table
        self.wide = has_wide_registers()
        self._values: Any = None
        self._later_values: Any = None
        if kind.bits < 8 and arithmetic is Arithmetic.DOTS:
            self._values = self._load(table, TABLE.HALVES, _vector(_HALF, 32))
        if kind.bits == 6 and arithmetic is Arithmetic.DOTS:
            self._later_values = self._load(table, TABLE.HALVES + 64, _vector(_HALF, 32))
        elif kind.bits == 4 and arithmetic is Arithmetic.INT8 and kind.table:
            self._values = self._load(table, TABLE.BYTES, _vector(_BYTE, 64))
        elif kind.bits == 4 and arithmetic is Arithmetic.FLOATS and self.wide:
            self._values = self._load(table, TABLE.FLOATS, FLOATS)
        elif kind.bits < 8 and arithmetic is Arithmetic.FLOATS and not kind.table:
            self._values = spread(builder, self._load(table, TABLE.FLOATS, _SINGLE))

    def _load(self, base: Any, offset: int, kind: Any) -> Any:
        return self.builder.load(address(self.builder, base, constant(offset), kind), align=1)

    def operands(self, line: Any, vector: int) -> list[tuple[int, Any]]:
        """Return the operands of a line for one vector of outputs, each with the offset of its inputs in bytes.

        line  its address
        """
        if self.arithmetic is Arithmetic.INT8:
            return self._fours(line, vector)
        if self.kind.bits == 6:
            return self._sixes(line, vector)
        values = self._nibbles(line, vector) if self.kind.bits == 4 else self._bytes(line, vector)
        if self.arithmetic is Arithmetic.FLOATS:
            return [(4 * i, value) for i, value in sorted(values.items())]
        if self.kind.bits == 4:
            return [(2 * i, value) for i, value in sorted(values.items())]
        return [(2 * i, self._paired(values[i], values[i + 1])) for i in range(0, INPUTS, 2)]

    def _paired(self, even: Any, odd: Any) -> Any:
        """Return two vectors of float32 that are exact in bfloat16 as pairs of bfloat16."""
        builder = self.builder
        low = builder.lshr(builder.bitcast(even, BITS), _bits(16))
        return builder.or_(low, builder.bitcast(odd, BITS))

    def _nibbles(self, line: Any, vector: int) -> dict[int, Any]:
        """Return the values of 4-bit codes by input; in DOTS arithmetic the pairs of inputs, by the first."""
        builder = self.builder
        word = self._load(line, 64 * vector, BITS)
        if self.arithmetic is Arithmetic.DOTS:  # vpermw reads 5 bits; the table is there twice
            halves = _vector(_HALF, 32)
            kind = ir.FunctionType(halves, [halves, halves])
            raw, found = builder.bitcast(word, halves), {}
            for i in range(4):
                index = builder.lshr(raw, _all(_HALF, 32, 4 * i)) if i else raw
                found[2 * i] = builder.asm(kind, "vpermw $1, $2, $0", "=v,v,v", [self._values, index], False)
            return found
        return {
            input_: self._value(builder.lshr(word, _bits(4 * i)) if i else word) for i, input_ in enumerate(POSITIONS)
        }

    def _value(self, word: Any) -> Any:
        """Return the values of the lowest nibbles of words in float32."""
        builder = self.builder
        if self.wide:  # vpermps reads 4 bits
            kind = ir.FunctionType(FLOATS, [FLOATS, BITS])
            return builder.asm(kind, "vpermps $1, $2, $0", "=v,v,v", [self._values, word], False)
        code = builder.and_(word, _bits(15))
        if not self.kind.table:
            return builder.fadd(builder.sitofp(code, FLOATS), self._values, flags=_FAST)
        values = ir.Constant(FLOATS, ir.Undefined)
        for lane in range(_LANES):
            index = builder.zext(builder.extract_element(code, ir.Constant(_NUMBER, lane)), _WORD)
            value = builder.load(address(builder, self.table, builder.shl(index, constant(2)), _SINGLE), align=4)
            values = builder.insert_element(values, value, ir.Constant(_NUMBER, lane))
        return values

    def _bytes(self, line: Any, vector: int) -> dict[int, Any]:
        """Return the values of 8-bit codes by input, in float32; whole numbers times 2^24."""
        found = {}
        for half, inputs in enumerate(FOURS):
            word = self._load(line, 64 * (_VECTORS * half + vector), BITS)
            for i, input_ in enumerate(inputs):
                found[input_] = self._left_aligned(word, i)
        return found

    def _left_aligned(self, word: Any, byte: int) -> Any:
        """Return the values of a byte of each word."""
        builder = self.builder
        upper = builder.shl(word, _bits(24 - 8 * byte)) if byte < 3 else word
        if not self.kind.table:
            if byte:
                upper = builder.and_(upper, _bits(0xFF000000))
            return builder.sitofp(upper, FLOATS)
        magnitude = builder.lshr(builder.and_(upper, _bits(0x7F000000)), _bits(4))
        bits = builder.or_(magnitude, builder.and_(upper, _bits(0x80000000)))
        return builder.fmul(builder.bitcast(bits, FLOATS), _all(_SINGLE, _LANES, _E4M3_SCALE))

    def _six_bit_words(self, line: Any, vector: int) -> list[Any]:
        """Return four words of 16 inputs, whose bytes have a code in their lowest six bits."""
        builder = self.builder
        words = [self._load(line, 64 * (_VECTORS * part + vector), BITS) for part in range(3)]
        upper = [builder.lshr(word, _bits(6 - 2 * part)) for part, word in enumerate(words)]
        masked = [builder.and_(word, _bits(0x03030303 << 2 * part)) for part, word in enumerate(upper)]
        return [*words, builder.or_(builder.or_(masked[0], masked[1]), masked[2])]

    def _sixes(self, line: Any, vector: int) -> list[tuple[int, Any]]:
        """Return the operands of 6-bit codes in arithmetic with floats."""
        builder, found = self.builder, []
        halves = _vector(_HALF, 32)
        kind = ir.FunctionType(halves, [halves, halves, halves])
        for index, word in enumerate(self._six_bit_words(line, vector)):
            first = index // 2 * INPUTS
            if self.arithmetic is Arithmetic.DOTS:  # vpermi2w reads 6 bits
                raw, values = builder.bitcast(word, halves), [self._values, self._later_values]
                for byte, input_ in enumerate(FOURS[index % 2][:2]):
                    place = builder.lshr(raw, _all(_HALF, 32, 8)) if byte else raw
                    operand = builder.asm(kind, "vpermi2w $3, $2, $0", "=v,0,v,v", [place, *values], False)
                    found.append((2 * (first + input_), operand))
                continue
            for byte, input_ in enumerate(FOURS[index % 2]):
                code = builder.and_(builder.lshr(word, _bits(8 * byte)) if byte else word, _bits(63))
                value = builder.fadd(builder.sitofp(code, FLOATS), self._values, flags=_FAST)
                found.append((4 * (first + input_), value))
        return sorted(found, key=lambda each: each[0])

    def _fours(self, line: Any, vector: int) -> list[tuple[int, Any]]:
        """Return unsigned bytes, four inputs in each word."""
        builder, vectors = self.builder, _vector(_BYTE, 64)
        if self.kind.bits == 6:
            words = self._six_bit_words(line, vector)
            return [(4 * i, builder.and_(word, _bits(0x3F3F3F3F))) for i, word in enumerate(words)]
        if self.kind.bits == 8:
            words = [self._load(line, 64 * (_VECTORS * half + vector), vectors) for half in range(2)]
            pair = [builder.xor(word, _all(_BYTE, 64, 0x80)) for word in words]
        else:
            pair = list(_both_nibbles(builder, self._load(line, 64 * vector, vectors), 64))
            if self.kind.table:
                kind = ir.FunctionType(vectors, [vectors, vectors])
                pair = [builder.asm(kind, "vpshufb $2, $1, $0", "=v,v,v", [self._values, x], False) for x in pair]
        return [(4 * half, builder.bitcast(x, BITS)) for half, x in enumerate(pair)]


def _both_nibbles(builder: Any, raw: Any, length: int) -> tuple[Any, Any]:
    """Return the low and the high nibbles of bytes."""
    mask, halves = _all(_BYTE, length, 15), _vector(_HALF, length // 2)
    high = builder.lshr(builder.bitcast(raw, halves), _all(_HALF, length // 2, 4))
    return builder.and_(raw, mask), builder.and_(builder.bitcast(high, _vector(_BYTE, length)), mask)


_INSTRUCTIONS = {Arithmetic.FLOATS: "vfmadd231ps", Arithmetic.DOTS: "vdpbf16ps", Arithmetic.INT8: "vpdpbusd"}


def _multiply(builder: Any, arithmetic: Arithmetic, total: Any, operand: Any, base: Any, offset: int) -> Any:
    """Return `total` plus an operand times the inputs at base + offset, the same for all lanes."""
    if has_wide_registers():
        # volatile, so that LLVM keeps the order: its own needs more registers than there are, and spills sums
        kind = ir.FunctionType(total.type, [operand.type, _WORD, total.type])
        text = f"{_INSTRUCTIONS[arithmetic]} {offset}($2){{1to16}}, $1, $0"
        return builder.asm(kind, text, "=v,v,r,0", [operand, base, total], True)
    x = spread(builder, builder.load(address(builder, base, constant(offset), _SINGLE), align=4))
    return builder.fadd(total, builder.fmul(x, operand, flags=_FAST), flags=_FAST)


def _numbers(builder: Any, place: Any, numbers: Numbers, length: int) -> Any:
    """Return consecutive scales or minima in float32."""
    if numbers is Numbers.FLOAT32:
        return builder.load(builder.inttoptr(place, _vector(_SINGLE, length).as_pointer()), align=4)
    if numbers is Numbers.INT8:
        whole = builder.load(builder.inttoptr(place, _vector(_BYTE, length).as_pointer()), align=1)
        return builder.sitofp(builder.sext(whole, _vector(_NUMBER, length)), _vector(_SINGLE, length))
    found = builder.load(builder.inttoptr(place, _vector(_FLOAT16, length).as_pointer()), align=2)
    return builder.fpext(found, _vector(_SINGLE, length))


class _Rows:
    """The rows that a tile multiplies, with their numbers for each block."""

    def __init__(self, builder: Any, arguments: Any, kind: PanelKind, arithmetic: Arithmetic, num_rows: int) -> None:
        self.builder, self.kind, self.arithmetic = builder, kind, arithmetic
        _, self.x, self.x_row, self.sums, self.scales, self.sums_row, _, self.table, _, _ = arguments
        self.num_rows = num_rows
        offset = builder.load(address(builder, self.table, constant(TABLE.OFFSET), _NUMBER), align=4)
        self._offset = builder.neg(offset)
        self._factor = builder.load(address(builder, self.table, constant(TABLE.FACTOR), _SINGLE), align=4)

    def inputs(self, row: int, block: Any) -> Any:
        """Return the address of a row's inputs of a block."""
        size = {Arithmetic.FLOATS: 4, Arithmetic.DOTS: 2, Arithmetic.INT8: 1}[self.arithmetic] * self.kind.block
        start = self.builder.add(self.x, self.builder.mul(self.x_row, constant(row)))
        return self.builder.add(start, self.builder.mul(block, constant(size)))

    def _number(self, numbers: Any, row: int, block: Any, kind: Any) -> Any:
        place = self.builder.add(self.builder.mul(self.sums_row, constant(row)), block)
        place = self.builder.shl(place, constant(2))
        return self.builder.load(address(self.builder, numbers, place, kind), align=4)

    def start(self, row: int, block: Any) -> Any:
        """Return the first term of an integer sum: the zero point times the sum of the inputs, negated."""
        return self.builder.mul(self._number(self.sums, row, block, _NUMBER), self._offset)

    def scale(self, row: int, block: Any) -> Any:
        """Return the scale of a row's inputs in int8."""
        return self.builder.fmul(self._number(self.scales, row, block, _SINGLE), self._factor, flags=_FAST)

    def sum(self, row: int, block: Any) -> Any:
        """Return the sum of a row's inputs in float32."""
        if self.arithmetic is not Arithmetic.INT8:
            return self._number(self.sums, row, block, _SINGLE)
        whole = self.builder.sitofp(self._number(self.sums, row, block, _NUMBER), _SINGLE)
        return self.builder.fmul(whole, self._number(self.scales, row, block, _SINGLE), flags=_FAST)


def quantised_tile(
    num_rows: int, arithmetic: Arithmetic, kind: PanelKind, *, widens: bool = False, num_passes: int = 1
) -> Any:
    """Return C [num_rows, PANEL] = A [num_rows, depth] B for one panel B. C is float32, its rows are PANEL apart.

    The arguments of the tile: addresses of C and A, bytes of a row of A, addresses of `sums` and `scales`, numbers in a
    row of these two, addresses of B and its table, number of blocks, `ahead`. FLOATS arithmetic reads float32 rows,
    DOTS bfloat16, INT8 int8 in the order of FOURS.

    sums    of a row's inputs in each block: float32, read if the kind has minima; int32 in INT8 arithmetic
    scales  of a row's inputs in each block, float32; read in INT8 arithmetic
    ahead   bytes from each block to memory of the same size that is prefetched
    widens  whether FLOATS arithmetic reads bfloat16 rows
    num_passes  over the panel, each of which multiplies with a part of the outputs; the last one prefetches `ahead`
    """
    if arithmetic is Arithmetic.INT8 and not (has_wide_registers() and has("avx512vnni")):
        return _pairs_tile(num_rows, kind)
    part_kind = BITS if arithmetic is Arithmetic.INT8 else FLOATS

    width = _VECTORS // num_passes

    def add_block(builder: Any, arguments: Any, totals: Any, block: Any, index: int) -> None:
        base, factors = block_address(builder, kind, arguments[6], block)
        _prefetch_block(builder, kind, base, arguments[9] if index == num_passes - 1 else constant(NEAR))
        rows_of = Arithmetic.DOTS if widens else arithmetic
        rows, decoder = _Rows(builder, arguments, kind, rows_of, num_rows), _decoder(builder, arguments)
        parts = [[cgutils.alloca_once(builder, part_kind) for _ in range(width)] for _ in range(num_rows)]
        for row, part in enumerate(parts):
            first = spread(builder, rows.start(row, block)) if arithmetic is Arithmetic.INT8 else _zero(part_kind)
            for vector in part:
                builder.store(first, vector)
        inputs = [rows.inputs(row, block) for row in range(num_rows)]
        if widens:
            inputs = [_widened(builder, place, kind.block) for place in inputs]
        size = {Arithmetic.FLOATS: 4, Arithmetic.DOTS: 2, Arithmetic.INT8: 1}[arithmetic] * kind.line
        for chunk in range(kind.block // kind.line):
            line = builder.add(base, constant(chunk * kind.line_bytes))
            for vector in range(width):
                for offset, operand in decoder.operands(line, index * width + vector):
                    for row, part in enumerate(parts):
                        place = chunk * size + offset
                        total = builder.load(part[vector])
                        total = _multiply(builder, arithmetic, total, operand, inputs[row], place)
                        builder.store(total, part[vector])
        scales, minima = scales_and_minima(builder, kind, base, factors, integers=arithmetic is Arithmetic.INT8)
        here = slice(index * width, (index + 1) * width)
        _add_scaled(builder, rows, (scales[here], minima[here]), block, parts, totals, _LANES)

    def _decoder(builder: Any, arguments: Any) -> Decoder:
        return Decoder(builder, arithmetic, kind, arguments[7])

    return _tile(num_rows, _LANES, add_block, num_passes)


def _prefetch_block(builder: Any, kind: PanelKind, base: Any, ahead: Any) -> None:
    place = builder.add(base, ahead)
    for line in range(0, kind.block_bytes, 64):
        prefetch(builder, place, constant(line))


def _widened(builder: Any, place: Any, num: int) -> Any:
    """Return the address of `num` bfloat16 of an address as float32."""
    wide = _vector(_NUMBER, num)
    halves = builder.load(address(builder, place, constant(0), _vector(_HALF, num)), align=2)
    held = cgutils.alloca_once(builder, wide)
    builder.store(builder.shl(builder.zext(halves, wide), _all(_NUMBER, num, 16)), held)
    return builder.ptrtoint(held, _WORD)


def _zero(kind: Any) -> Any:
    return ir.Constant(kind, [0] * kind.count) if kind is BITS else ir.Constant(kind, [0.0] * kind.count)


def _tile(num_rows: int, lanes: int, add_block: Callable[..., None], num_passes: int = 1) -> Any:
    """Return a tile whose sums grow by `add_block` (builder, arguments, totals, block, pass) for each block."""
    vectors = PANEL // lanes // num_passes

    @intrinsic
    def tile(
        typingctx: Any, c: Any, x: Any, x_row: Any, sums: Any, scales: Any, sums_row: Any, weight: Any, table: Any,
        num_blocks: Any, ahead: Any,
    ) -> Any:  # fmt: skip
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
            floats = _vector(_SINGLE, lanes)
            for index in range(num_passes):
                totals = [[cgutils.alloca_once(builder, floats) for _ in range(vectors)] for _ in range(num_rows)]
                for total in (total for row in totals for total in row):
                    builder.store(ir.Constant(floats, [0.0] * lanes), total)
                with cgutils.for_range(builder, arguments[8]) as loop:
                    add_block(builder, arguments, totals, loop.index, index)
                for row, of_row in enumerate(totals):
                    for vector, total in enumerate(of_row):
                        offset = constant(4 * (row * PANEL + lanes * (index * vectors + vector)))
                        builder.store(builder.load(total), address(builder, arguments[0], offset, floats), align=4)

        return types.void(*[types.int64] * 10), generate

    return tile


def _add_scaled(builder: Any, rows: _Rows, numbers: Any, block: Any, parts: Any, totals: Any, lanes: int) -> None:
    """Add the sums of a block times its scales, and its minima times the sums of the inputs, to the totals."""
    kind, integers = rows.kind, rows.arithmetic is Arithmetic.INT8
    floats = _vector(_SINGLE, lanes)
    scales, minima = numbers
    for vector, scale in enumerate(scales):
        for row in range(rows.num_rows):
            value = builder.load(parts[row][vector])
            if integers:
                value = builder.sitofp(value, floats)
                value = builder.fmul(value, _spread(builder, rows.scale(row, block), lanes), flags=_FAST)
            total = builder.load(totals[row][vector])
            total = builder.fadd(total, builder.fmul(value, scale, flags=_FAST), flags=_FAST)
            if kind.minimum:
                sums = _spread(builder, rows.sum(row, block), lanes)
                total = builder.fadd(total, builder.fmul(minima[vector], sums, flags=_FAST), flags=_FAST)
            builder.store(total, totals[row][vector])


def block_address(builder: Any, kind: PanelKind, weight: Any, block: Any) -> tuple[Any, Any]:
    """Return the address of a block of the panel at `weight`, and that of its factors if it has some."""
    offset = constant(kind.block_bytes)
    if kind.numbers is not Numbers.INT8:
        return builder.add(weight, builder.mul(block, offset)), None
    per_span = kind.span // kind.block
    span, within = builder.udiv(block, constant(per_span)), builder.urem(block, constant(per_span))
    factors = builder.add(weight, builder.mul(span, constant(kind.span_bytes)))
    first = builder.add(factors, constant(kind.factor_bytes))
    return builder.add(first, builder.mul(within, offset)), factors


def scales_and_minima(
    builder: Any, kind: PanelKind, base: Any, factors: Any, lanes: int = _LANES, *, integers: bool = False
) -> tuple[list[Any], list[Any]]:
    """Return the scales of the block at `base`, and its minima if it has some, as vectors of float32.

    factors   as `block_address` returns them
    integers  whether the sums that they multiply are those of whole numbers
    """

    def numbers_at(index: int, vector: int) -> Any:
        lane = index * PANEL + vector * lanes
        found = _numbers(builder, builder.add(base, constant(kind.codes_bytes + lane * numbers.size)), numbers, lanes)
        if numbers is not Numbers.INT8:
            return found
        factor = _numbers(builder, builder.add(factors, constant(2 * lane)), Numbers.FLOAT16, lanes)
        return builder.fmul(found, factor)

    numbers = kind.numbers
    scales: list[Any] = []
    minima: list[Any] = []
    for vector in range(PANEL // lanes):
        scale = numbers_at(0, vector)
        if not integers and kind.bits == 8 and not kind.table:
            scale = builder.fmul(scale, _all(_SINGLE, lanes, _INTEGER_SCALE), flags=_FAST)
        scales.append(scale)
        if kind.minimum:
            minima.append(numbers_at(1, vector))
    return scales, minima


def _spread(builder: Any, scalar: Any, lanes: int) -> Any:
    kind = _vector(scalar.type, lanes)
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(_NUMBER, 0))
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), _all(_NUMBER, lanes, 0))


def _pairs_tile(num_rows: int, kind: PanelKind) -> Any:
    """Return the tile of 4-bit codes in INT8 arithmetic by AVX2, whose products of pairs are sums in 16 bits.

    Eight products of at most 2 * 15 * 127, those of 32 inputs, fit 16 bits. Codes of a table do not.
    """
    lanes = 8
    pairs, fours = _vector(_HALF, 2 * lanes), _vector(_NUMBER, lanes)
    multiply = ir.FunctionType(pairs, [_vector(_BYTE, 4 * lanes), fours])
    join = ir.FunctionType(fours, [pairs, pairs])

    def add_block(builder: Any, arguments: Any, totals: Any, block: Any, index: int) -> None:
        base, factors = block_address(builder, kind, arguments[6], block)
        _prefetch_block(builder, kind, base, arguments[9])
        rows = _Rows(builder, arguments, kind, Arithmetic.INT8, num_rows)
        parts = [[cgutils.alloca_once(builder, fours) for _ in range(PANEL // lanes)] for _ in range(num_rows)]
        inputs = [rows.inputs(row, block) for row in range(num_rows)]
        for vector in range(PANEL // lanes):
            sums: list[Any] = [None] * num_rows
            for chunk in range(kind.block // INPUTS):
                place = constant(chunk * kind.line_bytes + 4 * lanes * vector)
                raw = builder.load(address(builder, base, place, _vector(_BYTE, 4 * lanes)), align=1)
                for row in range(num_rows):
                    for half, codes in enumerate(_both_nibbles(builder, raw, 4 * lanes)):
                        at = address(builder, inputs[row], constant(chunk * INPUTS + 4 * half), _NUMBER)
                        four = _spread(builder, builder.load(at, align=1), lanes)
                        product = builder.asm(multiply, "vpmaddubsw $2, $1, $0", "=x,x,x", [codes, four], False)
                        sums[row] = product if sums[row] is None else builder.add(sums[row], product)
            for row in range(num_rows):
                joined = builder.asm(join, "vpmaddwd $2, $1, $0", "=x,x,x", [sums[row], _all(_HALF, 16, 1)], False)
                first = _spread(builder, rows.start(row, block), lanes)
                builder.store(builder.add(joined, first), parts[row][vector])
        numbers = scales_and_minima(builder, kind, base, factors, lanes, integers=True)
        _add_scaled(builder, rows, numbers, block, parts, totals, lanes)

    return _tile(num_rows, lanes, add_block)
