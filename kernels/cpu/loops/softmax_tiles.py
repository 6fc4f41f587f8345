"""The innermost loops of prefill's softmax on AVX-512, as LLVM instructions, with 16 queries in a register."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from graftlm.kernels.cpu.calls import COLUMNS
from graftlm.kernels.cpu.loops.register_tiles import BITS, FLOATS, address, constant, spread

_SERIES = (0.0095701, 0.05591786, 0.24024745, 0.69312181, 0.99999926)
_LONG_SERIES = (1.53458116e-4, 1.33999312e-3, 9.61848896e-3, 5.55032878e-2, 0.240226469, 0.693147206, 1.0)
"""Coefficients of 2^x from -0.5 to 0.5: `_SERIES` is accurate to 3e-6, enough for bfloat16, `_LONG_SERIES` to the last
place of a float32."""


def _splat(value: float) -> Any:
    return ir.Constant(FLOATS, [value] * 16)


def highest_tile(width: int, *, masked: bool) -> Any:
    """Return the loop highest [16 * width] = max over keys of scores [num_keys, 16 * width], rows COLUMNS apart.

    masked  whether key j is hidden from columns whose `last_seen` (int32) is at most first + j: its score becomes -1e30
    """

    @intrinsic
    def tile(typingctx: Any, highest: Any, scores: Any, num_keys: Any, last_seen: Any, first: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
            highest, scores, num_keys, last_seen, first = arguments
            low = _splat(-1e30)
            most = [cgutils.alloca_once(builder, FLOATS) for _ in range(width)]
            for one in most:
                builder.store(low, one)
            if masked:
                seen = [
                    builder.load(address(builder, last_seen, constant(64 * i), BITS), align=4) for i in range(width)
                ]
            with cgutils.for_range(builder, num_keys) as loop:
                offset = builder.mul(loop.index, constant(4 * COLUMNS))
                if masked:
                    here = builder.trunc(builder.add(first, loop.index), ir.IntType(32))
                    here = spread(builder, here)
                for i in range(width):
                    place = address(builder, scores, builder.add(offset, constant(64 * i)), FLOATS)
                    score = builder.load(place, align=4)
                    if masked:
                        score = builder.select(builder.icmp_signed(">=", here, seen[i]), low, score)
                        builder.store(score, place, align=4)
                    held = builder.load(most[i])
                    builder.store(builder.select(builder.fcmp_ordered(">", score, held), score, held), most[i])
            for i in range(width):
                place = address(builder, highest, constant(64 * i), FLOATS)
                builder.store(builder.load(most[i]), place, align=4)

        integer = types.int64
        return types.void(integer, integer, integer, integer, integer), generate

    return tile


def weights_tile(width: int) -> Any:
    """Return the loop weights = 2^(scores * factor - shift), bfloat16 in pairs of keys; sums over the keys.

    scores [2 * num_pairs, 16 * width] float32, weights [num_pairs, 16 * width, 2]; rows of both COLUMNS apart
    """

    @intrinsic
    def tile(typingctx: Any, weights: Any, sums: Any, scores: Any, shift: Any, factor: Any, num_pairs: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
            weights, sums, scores, shift, factor, num_pairs = arguments
            shifts = [builder.load(address(builder, shift, constant(64 * i), FLOATS), align=4) for i in range(width)]
            times = spread(builder, factor)
            totals = [cgutils.alloca_once(builder, FLOATS) for _ in range(width)]
            for total in totals:
                builder.store(_splat(0.0), total)
            half, upper = ir.Constant(BITS, [0x8000] * 16), ir.Constant(BITS, [0xFFFF0000] * 16)
            with cgutils.for_range(builder, num_pairs) as loop:
                offset = builder.mul(loop.index, constant(8 * COLUMNS))
                there = builder.mul(loop.index, constant(4 * COLUMNS))
                for i in range(width):
                    pair = []
                    for key in range(2):
                        place = builder.add(offset, constant(4 * COLUMNS * key + 64 * i))
                        score = builder.load(address(builder, scores, place, FLOATS), align=4)
                        x = builder.fsub(builder.fmul(score, times, flags=("fast",)), shifts[i], flags=("fast",))
                        value = _exp2(builder, x, _SERIES)
                        builder.store(builder.fadd(builder.load(totals[i]), value), totals[i])
                        pair.append(builder.add(builder.bitcast(value, BITS), half))
                    low, high = pair
                    low = builder.lshr(low, ir.Constant(BITS, [16] * 16))
                    both = builder.or_(low, builder.and_(high, upper))
                    builder.store(both, address(builder, weights, builder.add(there, constant(64 * i)), BITS), align=4)
            for i in range(width):
                builder.store(builder.load(totals[i]), address(builder, sums, constant(64 * i), FLOATS), align=4)

        integer = types.int64
        return types.void(integer, integer, integer, integer, types.float32, integer), generate

    return tile


def float32_weights_tile(width: int) -> Any:
    """Return the loop scores [num_keys, 16 * width] = 2^(scores * factor - shift), rows COLUMNS apart; and sums."""

    @intrinsic
    def tile(typingctx: Any, sums: Any, scores: Any, shift: Any, factor: Any, num_keys: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
            sums, scores, shift, factor, num_keys = arguments
            shifts = [builder.load(address(builder, shift, constant(64 * i), FLOATS), align=4) for i in range(width)]
            times = spread(builder, factor)
            totals = [cgutils.alloca_once(builder, FLOATS) for _ in range(width)]
            for total in totals:
                builder.store(_splat(0.0), total)
            with cgutils.for_range(builder, num_keys) as loop:
                offset = builder.mul(loop.index, constant(4 * COLUMNS))
                for i, total in enumerate(totals):
                    place = address(builder, scores, builder.add(offset, constant(64 * i)), FLOATS)
                    score = builder.load(place, align=4)
                    x = builder.fsub(builder.fmul(score, times, flags=("fast",)), shifts[i], flags=("fast",))
                    value = _exp2(builder, x, _LONG_SERIES)
                    builder.store(builder.fadd(builder.load(total), value), total)
                    builder.store(value, place, align=4)
            for i, total in enumerate(totals):
                builder.store(builder.load(total), address(builder, sums, constant(64 * i), FLOATS), align=4)

        integer = types.int64
        return types.void(integer, integer, integer, types.float32, integer), generate

    return tile


def _exp2(builder: Any, x: Any, terms: Sequence[float]) -> Any:
    """Compute 2^x by a series of its fraction; 0 on underflow."""
    one, two = ir.FunctionType(FLOATS, [FLOATS]), ir.FunctionType(FLOATS, [FLOATS, FLOATS])
    whole = builder.asm(one, "vrndscaleps $$0, $1, $0", "=v,v", [x], False)
    rest = builder.fsub(x, whole)
    series = _splat(terms[0])
    for c in terms[1:]:
        series = builder.fadd(builder.fmul(series, rest, flags=("fast",)), _splat(c), flags=("fast",))
    return builder.asm(two, "vscalefps $2, $1, $0", "=v,v,v", [series, whole], False)
