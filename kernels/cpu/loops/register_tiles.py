"""The innermost loops of matmuls on a CPU, as LLVM instructions: a tile's sums stay in vector registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from graftlm.kernels.cpu import PANEL
from graftlm.kernels.cpu.compiled.object_code import processor
from graftlm.kernels.cpu.element_format import ElementFormat

_WORD, _HALF, _NUMBER, _SINGLE = ir.IntType(64), ir.IntType(16), ir.IntType(32), ir.FloatType()
FLOATS, BITS = ir.VectorType(_SINGLE, 16), ir.VectorType(_NUMBER, 16)
_FOUR = ir.VectorType(_SINGLE, 4)
_ZERO = ir.Constant(FLOATS, [0.0] * 16)
_NO_BITS = ir.Constant(BITS, [0] * 16)


def has_wide_registers() -> bool:
    """Return True if loops are compiled for 32 registers of 16 float32 (AVX-512) instead of 16 of 8, or 32 of 4."""
    return has("avx512f")


def has_bfloat16_dots() -> bool:
    """Return True if loops are compiled for a processor with bfloat16 dot products in float32 (AVX-512 BF16)."""
    return has_wide_registers() and has("avx512bf16")


def has(feature: str) -> bool:
    """Return True if loops are compiled for a processor with this feature, by LLVM's name."""
    return feature in processor()[1]


class _Sums:
    """Vectors of 16 float32 sums, [num_rows][width], in registers."""

    def __init__(self, builder: Any, num_rows: int, width: int) -> None:
        self.builder = builder
        self.rows = [[cgutils.alloca_once(builder, FLOATS) for _ in range(width)] for _ in range(num_rows)]
        for total in (total for row in self.rows for total in row):
            builder.store(_ZERO, total)

    def add_products(self, row: int, x: Any, lines: list[Any]) -> None:
        """Add x * lines[j] to rows[row][j]."""
        for total, line in zip(self.rows[row], lines, strict=True):
            product = self.builder.fmul(x, line, flags=("fast",))
            self.builder.store(self.builder.fadd(self.builder.load(total), product, flags=("fast",)), total)

    def add_dots(self, row: int, x: Any, lines: list[Any]) -> None:
        """Add x * lines[j], two bfloat16 in each of 16 lanes, to rows[row][j] by one instruction."""
        kind = ir.FunctionType(FLOATS, [BITS, BITS, FLOATS])
        for total, line in zip(self.rows[row], lines, strict=True):
            arguments = [line, x, self.builder.load(total)]
            self.builder.store(self.builder.asm(kind, "vdpbf16ps $2, $1, $0", "=v,v,v,0", arguments, False), total)


def constant(value: int) -> Any:
    return ir.Constant(_WORD, value)


def address(builder: Any, base: Any, offset: Any, kind: Any) -> Any:
    return builder.inttoptr(builder.add(base, offset), kind.as_pointer())


def spread(builder: Any, scalar: Any) -> Any:
    """Broadcast a float or integer of 32 bits to a vector of 16."""
    zero = _ZERO if scalar.type == _SINGLE else _NO_BITS
    one = builder.insert_element(zero, scalar, ir.Constant(_NUMBER, 0))
    return builder.shuffle_vector(one, zero, _NO_BITS)


def _load(builder: Any, base: Any, offset: Any, element: ElementFormat, kind: Any) -> Any:
    """Load an element (kind float) or 16 consecutive ones (a vector of floats), and widen to float32."""
    if element is ElementFormat.FLOAT32:
        return builder.load(address(builder, base, offset, kind), align=4)
    whole = kind is FLOATS
    halves = builder.load(address(builder, base, offset, ir.VectorType(_HALF, 16) if whole else _HALF), align=2)
    bits = BITS if whole else _NUMBER
    shift = ir.Constant(bits, [16] * 16) if whole else ir.Constant(bits, 16)
    return builder.bitcast(builder.shl(builder.zext(halves, bits), shift), kind)


def _separate_halves(builder: Any, lines: list[Any]) -> list[list[Any]]:
    low = [builder.shl(x, ir.Constant(BITS, [16] * 16)) for x in lines]
    high = [builder.and_(x, ir.Constant(BITS, [0xFFFF0000] * 16)) for x in lines]
    return [[builder.bitcast(x, FLOATS) for x in part] for part in (low, high)]


_WIDEN: dict[ElementFormat, Callable[[Any, list[Any]], list[list[Any]]]] = {
    ElementFormat.FLOAT32: lambda builder, lines: [[builder.bitcast(x, FLOATS) for x in lines]],
    ElementFormat.BFLOAT16: _separate_halves,
}
"""Format -> its widening: vectors of 16 times 32 bits, the interleaved inputs of 16 outputs -> vectors of 16 float32
for each input."""


def outer_tile(
    num_rows: int,
    width: int,
    *,
    a: ElementFormat = ElementFormat.FLOAT32,
    b: ElementFormat = ElementFormat.FLOAT32,
    add: bool = False,
) -> Any:
    """Return C [num_rows, 16 * width] = A [num_rows, depth] B [depth, 16 * width], as outer products. C is float32.

    A is read through two strides in bytes: from row to row and from column to column. B is a panel, whose `interleaved`
    rows lie side by side: [depth / interleaved, PANEL, interleaved]. Rows of B and C are PANEL apart.

    a, b  formats of A and B
    add   whether the product, summed separately, is added to C
    """
    a_format, b_format = a, b
    shift = b_format.interleaved.bit_length() - 1

    @intrinsic
    def tile(typingctx: Any, c: Any, a: Any, a_row: Any, a_step: Any, b: Any, depth: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
            c, a, a_row, a_step, b, depth = arguments
            sums = _Sums(builder, num_rows, width)
            with cgutils.for_range(builder, builder.lshr(depth, constant(shift)) if shift else depth) as loop:
                offset = builder.mul(loop.index, constant(4 * PANEL))
                lines = [
                    builder.load(address(builder, b, builder.add(offset, constant(64 * i)), BITS), align=4)
                    for i in range(width)
                ]
                parts = _WIDEN[b_format](builder, lines)
                step = builder.mul(loop.index, builder.mul(a_step, constant(len(parts))))
                for row in range(num_rows):
                    start = builder.add(step, builder.mul(a_row, constant(row)))
                    for j, part in enumerate(parts):
                        place = builder.add(start, builder.mul(a_step, constant(j)))
                        sums.add_products(row, spread(builder, _load(builder, a, place, a_format, _SINGLE)), part)
            for i, totals in enumerate(sums.rows):
                for j, total in enumerate(totals):
                    place = address(builder, c, constant(4 * (i * PANEL + 16 * j)), FLOATS)
                    value = builder.load(total)
                    if add:
                        value = builder.fadd(builder.load(place, align=4), value)
                    builder.store(value, place, align=4)

        integer = types.int64
        return types.void(integer, integer, integer, integer, integer, integer), generate

    return tile


def outer_dot_tile(num_rows: int, width: int, *, add: bool = False) -> Any:
    """Return `outer_tile` for bfloat16 A and B. A is read in pairs of columns through two strides.

    add  whether the product is added to C
    For processors that have bfloat16 dots.
    """

    @intrinsic
    def tile(typingctx: Any, c: Any, a: Any, a_row: Any, a_pair: Any, b: Any, depth: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
            c, a, a_row, a_pair, b, depth = arguments
            sums = _Sums(builder, num_rows, width)
            with cgutils.for_range(builder, builder.lshr(depth, constant(1))) as loop:
                offset = builder.mul(loop.index, constant(4 * PANEL))
                lines = [
                    builder.load(address(builder, b, builder.add(offset, constant(64 * i)), BITS), align=4)
                    for i in range(width)
                ]
                step = builder.mul(loop.index, a_pair)
                for row in range(num_rows):
                    place = builder.add(step, builder.mul(a_row, constant(row)))
                    pair = builder.load(address(builder, a, place, _NUMBER), align=4)
                    sums.add_dots(row, spread(builder, pair), lines)
            for i, totals in enumerate(sums.rows):
                for j, total in enumerate(totals):
                    place = address(builder, c, constant(4 * (i * PANEL + 16 * j)), FLOATS)
                    value = builder.load(total)
                    if add:
                        value = builder.fadd(builder.load(place, align=4), value)
                    builder.store(value, place, align=4)

        integer = types.int64
        return types.void(integer, integer, integer, integer, integer, integer), generate

    return tile


def inner_tile(num_rows: int, b: ElementFormat) -> Any:
    """Return C [num_rows, 4] = A [num_rows, depth] B^T, as inner products. A and C are float32; B [4, depth] row-major.

    depth is a multiple of 16, `a_row` is in bytes, and rows of C are PANEL apart.

    b  format of B
    """
    b_format = b

    def weights(builder: Any, b: Any, offset: Any) -> Any:
        return _load(builder, b, offset, b_format, FLOATS)

    def inputs(builder: Any, a: Any, offset: Any) -> Any:
        return _load(builder, a, offset, ElementFormat.FLOAT32, FLOATS)

    return _inner_tile(num_rows, 16, b_format.size, 4, weights, inputs, _Sums.add_products)


def inner_dot_tile(num_rows: int) -> Any:
    """Return `inner_tile` for bfloat16 A and B; depth is a multiple of 32.

    For processors that have bfloat16 dots.
    """

    def pairs(builder: Any, x: Any, offset: Any) -> Any:
        return builder.load(address(builder, x, offset, BITS), align=2)

    return _inner_tile(num_rows, 32, 2, 2, pairs, pairs, _Sums.add_dots)


def _inner_tile(
    num_rows: int, at_once: int, size: int, a_size: int, weights: Any, inputs: Any, add: Callable[..., None]
) -> Any:
    """Return a tile whose iterations read `at_once` elements of `size` bytes of B's rows, of `a_size` bytes of A's.

    Each iteration prefetches the tile after the next in memory order: hardware does not predict reads of four short
    rows.
    """

    @intrinsic
    def tile(typingctx: Any, c: Any, a: Any, a_row: Any, b: Any, depth: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
            c, a, a_row, b, depth = arguments
            b_row = builder.mul(depth, constant(size))
            sums = _Sums(builder, num_rows, 4)
            with cgutils.for_range(builder, builder.udiv(depth, constant(at_once))) as loop:
                step = builder.mul(loop.index, constant(at_once * size))
                places = [builder.add(step, builder.mul(b_row, constant(i))) for i in range(4)]
                ahead = builder.add(builder.mul(b_row, constant(8)), builder.mul(step, constant(4)))
                for line in range(0, 4 * at_once * size, 64):
                    prefetch(builder, b, builder.add(ahead, constant(line)))
                lines = [weights(builder, b, place) for place in places]
                step = builder.mul(loop.index, constant(at_once * a_size))
                for row in range(num_rows):
                    place = builder.add(step, builder.mul(a_row, constant(row)))
                    add(sums, row, inputs(builder, a, place), lines)
            for i, totals in enumerate(sums.rows):
                place = address(builder, c, constant(4 * i * PANEL), _FOUR)
                builder.store(_four_sums(builder, [builder.load(total) for total in totals]), place, align=4)

        integer = types.int64
        return types.void(integer, integer, integer, integer, integer), generate

    return tile


def _four_sums(builder: Any, vectors: list[Any]) -> Any:
    """Sum the elements of each of four vectors."""

    def halved(a: Any, b: Any, width: int) -> Any:
        """Reduce groups of 2 * width elements of a, then of b, to groups of `width`, by adding halves."""
        lower = [g + i for g in range(0, 32, 2 * width) for i in range(width)]
        parts = [builder.shuffle_vector(a, b, ir.Constant(BITS, [x + n for x in lower])) for n in (0, width)]
        return builder.fadd(*parts, flags=("fast",))

    a, b, c, d = vectors
    value = halved(halved(a, b, 8), halved(c, d, 8), 4)
    for width in (2, 1):
        order = [g + (i + width) % (2 * width) for g in range(0, 16, 2 * width) for i in range(2 * width)]
        moved = builder.shuffle_vector(value, _ZERO, ir.Constant(BITS, order))
        value = builder.fadd(value, moved, flags=("fast",))
    return builder.shuffle_vector(value, _ZERO, ir.Constant(ir.VectorType(_NUMBER, 4), [0, 4, 8, 12]))


def prefetch(builder: Any, base: Any, offset: Any) -> None:
    """Prefetch a line of memory into the caches; an invalid address is no error."""
    pointer = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, _NUMBER, _NUMBER, _NUMBER])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    numbers = [ir.Constant(_NUMBER, x) for x in (0, 3, 1)]  # to read, in all caches, of data
    builder.call(function, [address(builder, base, offset, ir.IntType(8)), *numbers])
