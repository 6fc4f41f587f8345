"""The matmul of many rows with a quantised panel by AMX tiles, as LLVM instructions: codes become tiles of bfloat16.

A tile multiplies 16 rows by 16 outputs for the inputs of one block, whose scales then multiply its float32 sums: the
codes stay exact. While a tile is multiplied, vector instructions decode the codes of the next block and add the sums of
the tile before: each of these waits for nothing that was written just now.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from graftlm.kernels.cpu import PANEL
from graftlm.kernels.cpu.loops.quantised_tiles import Decoder, block_address, scales_and_minima
from graftlm.kernels.cpu.loops.register_tiles import FLOATS, address, constant, spread
from graftlm.kernels.cpu.panel_kind import Arithmetic, PanelKind

_BYTE, _WORD, _SINGLE, _VOID = ir.IntType(8), ir.IntType(64), ir.FloatType(), ir.VoidType()
_FAST = ("fast",)
ROWS = 16
"""The most rows of a tile."""
_LINE = 64
"""Bytes of a row of a tile, and of a register."""
_VECTORS = PANEL // 16
_INPUTS, _CODES = 4, (5, 6, 7, 5)
"""Tile registers of rows, and of the codes of each vector of outputs; the sums of a vector have its number."""


class Tiles:
    """The instructions on tile registers, which one thread configures, uses and releases."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def _run(self, text: str, *arguments: Any) -> None:
        kind = ir.FunctionType(_VOID, [_WORD] * len(arguments))
        constraints = ",".join([*["r"] * len(arguments), "~{memory}"])
        self.builder.asm(kind, text, constraints, list(arguments), True)

    def configure(self, memory: Any, num_rows: Any, block: int) -> None:
        """Set the shapes of all tiles; memory, 64 bytes, holds them. `num_rows` of inputs, `block` inputs."""
        builder = self.builder
        shapes = ir.VectorType(_BYTE, _LINE)
        builder.store(ir.Constant(shapes, [1] + [0] * (_LINE - 1)), address(builder, memory, constant(0), shapes))
        for tile in range(8):
            rows = ir.Constant(_BYTE, block // 2) if tile in _CODES else builder.trunc(num_rows, _BYTE)
            width = 2 * block if tile == _INPUTS else _LINE
            builder.store(ir.Constant(_BYTE, width), address(builder, memory, constant(16 + 2 * tile), _BYTE))
            builder.store(rows, address(builder, memory, constant(48 + tile), _BYTE))
        self._run("ldtilecfg ($0)", memory)

    def load(self, tile: int, place: Any, stride: Any) -> None:
        self._run(f"tileloadd ($0,$1), %tmm{tile}", place, stride)

    def zero(self, tile: int) -> None:
        self._run(f"tilezero %tmm{tile}")

    def dot(self, sums: int, inputs: int, codes: int) -> None:
        self._run(f"tdpbf16ps %tmm{codes}, %tmm{inputs}, %tmm{sums}")

    def store(self, tile: int, place: Any, stride: Any) -> None:
        self._run(f"tilestored %tmm{tile}, ($0,$1)", place, stride)

    def release(self) -> None:
        self._run("tilerelease")


def _memory(builder: Any, num_bytes: int) -> Any:
    """Return the address of memory of this function that begins at a line of the cache."""
    held = cgutils.alloca_once(builder, ir.ArrayType(_BYTE, num_bytes + _LINE))
    start = builder.add(builder.ptrtoint(held, _WORD), constant(_LINE - 1))
    return builder.and_(start, constant(-_LINE))


class _Matmul:
    """The code of one matmul: all blocks of a panel times all rows, in tiles of as many rows, which may overlap."""

    def __init__(self, builder: Any, arguments: Any, kind: PanelKind, tiles: Tiles) -> None:
        self.builder, self.kind, self.tiles = builder, kind, tiles
        self.c, self.x, self.x_row, self.sums, self.sums_row, self.weight, table, self.num_blocks, self.num_rows = (
            arguments
        )
        self.decoder = Decoder(builder, Arithmetic.DOTS, kind, table)
        self.tile_bytes = kind.block // 2 * _LINE
        self.num_tiles = builder.udiv(builder.add(self.num_rows, constant(ROWS - 1)), constant(ROWS))
        self.rows = builder.udiv(builder.sub(builder.add(self.num_rows, self.num_tiles), constant(1)), self.num_tiles)
        self._codes = _memory(builder, 2 * _VECTORS * self.tile_bytes)  # of even and of odd blocks
        self.parts = _memory(builder, _VECTORS * ROWS * _LINE)
        # the tiles whose sums are in `parts`: block + 1 or 0, first row, rows that a tile before has computed
        self.last = [cgutils.alloca_once_value(builder, constant(0)) for _ in range(3)]

    def run(self) -> None:
        builder, tiles = self.builder, self.tiles
        tiles.configure(_memory(builder, _LINE), self.rows, self.kind.block)
        with cgutils.for_range(builder, builder.mul(self.num_rows, constant(_VECTORS))) as loop:
            place = builder.mul(loop.index, constant(_LINE))
            builder.store(ir.Constant(FLOATS, [0.0] * 16), address(builder, self.c, place, FLOATS), align=4)
        self._decode(constant(0))
        with (
            cgutils.for_range(builder, self.num_blocks) as blocks,
            cgutils.for_range(builder, self.num_tiles) as loop,
        ):
            whole, final = builder.mul(loop.index, self.rows), builder.sub(self.num_rows, self.rows)
            first = builder.select(builder.icmp_signed("<", whole, final), whole, final)
            self._multiply(blocks.index, first)
            later = builder.add(blocks.index, constant(1))
            is_first, has_next = builder.icmp_signed("==", whole, constant(0)), self._before_end(later)
            with builder.if_then(builder.and_(is_first, has_next)):
                self._decode(later)
            self._add_last()
            for vector in range(_VECTORS):
                tiles.store(vector, builder.add(self.parts, constant(vector * ROWS * _LINE)), constant(_LINE))
            now = later, first, builder.sub(whole, first)
            for value, place in zip(now, self.last, strict=True):
                builder.store(value, place)
        self._add_last()
        tiles.release()

    def _before_end(self, block: Any) -> Any:
        return self.builder.icmp_signed("<", block, self.num_blocks)

    def _codes_of(self, block: Any) -> Any:
        """Return the address of a block's decoded codes."""
        odd = self.builder.and_(block, constant(1))
        return self.builder.add(self._codes, self.builder.mul(odd, constant(_VECTORS * self.tile_bytes)))

    def _decode(self, block: Any) -> None:
        """Store a block's codes as a tile of bfloat16 for each vector of outputs."""
        builder, codes = self.builder, self._codes_of(block)
        base, _ = block_address(builder, self.kind, self.weight, block)
        for chunk in range(self.kind.block // self.kind.line):
            line = builder.add(base, constant(chunk * self.kind.line_bytes))
            for vector in range(_VECTORS):
                for offset, operand in self.decoder.operands(line, vector):
                    place = vector * self.tile_bytes + (chunk * self.kind.line // 2 + offset // 4) * _LINE
                    builder.store(operand, address(builder, codes, constant(place), operand.type), align=_LINE)

    def _multiply(self, block: Any, first: Any) -> None:
        """Multiply a block's codes by the rows from `first` on."""
        builder, tiles, codes = self.builder, self.tiles, self._codes_of(block)
        inputs = builder.add(self.x, builder.mul(block, constant(2 * self.kind.block)))
        tiles.load(_INPUTS, builder.add(inputs, builder.mul(first, self.x_row)), self.x_row)
        for vector, tile in enumerate(_CODES):
            tiles.zero(vector)
            tiles.load(tile, builder.add(codes, constant(vector * self.tile_bytes)), constant(_LINE))
            tiles.dot(vector, _INPUTS, tile)

    def _add_last(self) -> None:
        """Add the sums of the last tiles, times their scales, to C."""
        builder = self.builder
        block, first, skipped = (builder.load(place) for place in self.last)
        with builder.if_then(builder.icmp_signed("!=", block, constant(0))):
            block = builder.sub(block, constant(1))
            places = block_address(builder, self.kind, self.weight, block)
            scales, minima = scales_and_minima(builder, self.kind, *places)
            with cgutils.for_range(builder, self.rows, start=skipped) as loop:
                row = builder.add(first, loop.index)
                sums = self._sum(row, block) if self.kind.minimum else None
                for vector in range(_VECTORS):
                    offset = builder.add(builder.mul(row, constant(4 * PANEL)), constant(_LINE * vector))
                    to = address(builder, self.c, offset, FLOATS)
                    offset = builder.add(builder.mul(loop.index, constant(_LINE)), constant(vector * ROWS * _LINE))
                    part = builder.load(address(builder, self.parts, offset, FLOATS), align=_LINE)
                    total = builder.load(to, align=4)
                    total = builder.fadd(total, builder.fmul(part, scales[vector], flags=_FAST), flags=_FAST)
                    if sums is not None:
                        added = builder.fmul(minima[vector], sums, flags=_FAST)
                        total = builder.fadd(total, added, flags=_FAST)
                    builder.store(total, to, align=4)

    def _sum(self, row: Any, block: Any) -> Any:
        """Return the sum of a row's inputs in a block, in all lanes."""
        builder = self.builder
        place = builder.shl(builder.add(builder.mul(row, self.sums_row), block), constant(2))
        return spread(builder, builder.load(address(builder, self.sums, place, _SINGLE), align=4))


def amx_panel(kind: PanelKind, tiles_of: type[Tiles] = Tiles) -> Any:
    """Return C [num_rows, PANEL] = A [num_rows, depth] B, as `quantised_tile` in DOTS arithmetic, for 1 row and more.

    The arguments: addresses of C and A, bytes of a row of A, address of the sums and numbers in a row of them,
    addresses of B and its table, number of blocks, number of rows.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _Matmul(builder, arguments, kind, tiles_of(builder)).run()
        return context.get_dummy_value()

    @intrinsic
    def tile(
        typingctx: Any, c: Any, x: Any, x_row: Any, sums: Any, sums_row: Any, weight: Any, table: Any, num_blocks: Any,
        num_rows: Any,
    ) -> Any:  # fmt: skip
        return types.void(*[types.int64] * 9), generate

    return tile
