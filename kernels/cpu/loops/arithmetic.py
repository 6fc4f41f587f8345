"""Shared parts of the compiled CPU loops: tasks, scratch memory, bfloat16 and elementwise arithmetic.

A loop is a C function `void (call *)` that numba compiles. All its arguments are fields of one ctypes structure, whose
first field counts tasks: each thread takes the next task until none is left, so any number of threads may run the loop.
Elements are those of an ElementFormat (element_format.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

FLAGS: dict[str, Any] = {"fastmath": True, "error_model": "numpy"}


@intrinsic
def next_task(typingctx: Any, call: Any) -> tuple[Any, Callable[..., Any]]:
    """Return the number of the next task: an atomic increment, so each task goes to exactly one thread."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        counter = builder.bitcast(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", counter, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(call), generate


@intrinsic
def add_done(typingctx: Any, call: Any, num: Any) -> tuple[Any, Callable[..., Any]]:
    """Count tasks as finished, in the word after that of `next_task`; see `wait_until_done`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(64)
        counter = builder.gep(builder.bitcast(arguments[0], word.as_pointer()), [ir.Constant(word, 1)])
        builder.atomic_rmw("add", counter, arguments[1], "acq_rel")
        return context.get_dummy_value()

    return types.void(call, types.int64), generate


@intrinsic
def _count(typingctx: Any, address: Any) -> tuple[Any, Callable[..., Any]]:
    """Load the counter at an address, with the writes of other threads."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(arguments[0], ir.IntType(64).as_pointer()), "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def is_first(typingctx: Any, address: Any, turn: Any) -> tuple[Any, Callable[..., Any]]:
    """Return True in the first thread that increments the counter at an address from `turn`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        counter = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        following = builder.add(arguments[1], ir.Constant(ir.IntType(64), 1))
        pair = builder.cmpxchg(counter, arguments[1], following, "acq_rel", "acquire")
        return builder.extract_value(pair, 1)

    return types.boolean(types.int64, types.int64), generate


_YIELD = ("llvm.aarch64.hint", [ir.Constant(ir.IntType(32), 1)])
_HINTS = {"x86_64": ("llvm.x86.sse2.pause", []), "aarch64": _YIELD, "arm64": _YIELD}
"""The intrinsic of a spin loop, by machine. No inline assembly: LLVM parses that of its own machine alone."""


@intrinsic
def _pause(typingctx: Any) -> tuple[Any, Callable[..., Any]]:
    """Emit the processor's hint for a spin loop."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        machine = llvm.get_process_triple().partition("-")[0]
        name, hint = _HINTS.get(machine, ("", []))
        if name:
            kind = ir.FunctionType(ir.VoidType(), [each.type for each in hint])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, name), hint)
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def _give_way(typingctx: Any) -> tuple[Any, Callable[..., Any]]:
    """Yield this core to another thread."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), generate


_SPINS = 4000
"""Reads of a counter, a tenth of a millisecond, before a thread yields: the awaited thread may have no core."""


@njit(forceinline=True, **FLAGS)
def wait_until_done(address, num):
    """Wait until `num` tasks of the counters at an address are finished; their writes are then visible."""
    looks = 0
    while _count(address + 8) < num:
        looks += 1
        if looks < _SPINS:
            _pause()
        else:
            _give_way()


@intrinsic
def at(typingctx: Any, address: Any) -> tuple[Any, Callable[..., Any]]:
    """Convert an integer address to a pointer."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@intrinsic
def allocate(typingctx: Any, num_bytes: Any) -> tuple[Any, Callable[..., Any]]:
    """Allocate memory by the C library, so that machine code needs no numba runtime. See `release`.

    The address is written and read atomically: LLVM knows the result of malloc, and would assume that pointers
    computed from integer sums do not alias it.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(8).as_pointer(), [ir.IntType(64)])
        function = cgutils.get_or_insert_function(builder.module, kind, "malloc")
        word = ir.IntType(64)
        address = builder.ptrtoint(builder.call(function, arguments), word)
        place = cgutils.alloca_once(builder, word)
        builder.store_atomic(address, place, "monotonic", 8)
        return builder.load_atomic(place, "monotonic", 8)

    return types.int64(types.int64), generate


@intrinsic
def release(typingctx: Any, address: Any) -> tuple[Any, Callable[..., Any]]:
    """Free memory of `allocate`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.VoidType(), [pointer]), "free")
        builder.call(function, [builder.inttoptr(arguments[0], pointer)])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def _prefetch_line(typingctx: Any, address: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        numbers = [ir.Constant(number, x) for x in (0, 3, 1)]  # to read, in all caches, of data
        builder.call(function, [builder.inttoptr(arguments[0], pointer), *numbers])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@njit(forceinline=True, **FLAGS)
def prefetch_all(address, num_bytes):
    """Prefetch memory into the caches; an invalid address is no error."""
    for place in range(address, address + num_bytes, 64):
        _prefetch_line(place)


@intrinsic
def call_at(typingctx: Any, function: Any, argument: Any) -> tuple[Any, Callable[..., Any]]:
    """Call the function at this address with this pointer, or a function without arguments."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer]).as_pointer()
        builder.call(builder.inttoptr(arguments[0], kind), [builder.inttoptr(arguments[1], pointer)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@njit(forceinline=True, **FLAGS)
def float_array(address, shape):
    """Return a float32 array of this shape at an address, and the address after it."""
    size = 4
    for length in shape:
        size *= length
    return carray(at(address), shape, np.float32), address + size


@intrinsic
def from_bits(typingctx: Any, bits: Any) -> tuple[Any, Callable[..., Any]]:
    """Return the float32 with these bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


@intrinsic
def widen(typingctx: Any, x: Any) -> tuple[Any, Callable[..., Any]]:
    """Widen an element to float32: bfloat16 is the upper half of its bits, an int8 is converted."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        (value,) = arguments
        if x == types.float32:
            return value
        if x == types.int8:
            return builder.sitofp(value, ir.FloatType())
        word = ir.IntType(32)
        return builder.bitcast(builder.shl(builder.zext(value, word), ir.Constant(word, 16)), ir.FloatType())

    return types.float32(x), generate


@intrinsic
def narrow(typingctx: Any, x: Any, like: Any) -> tuple[Any, Callable[..., Any]]:
    """Convert float32 to an element of the array `like`; bfloat16 rounds to nearest, ties to even."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value = arguments[0]
        if like.dtype == types.float32:
            return value
        word = ir.IntType(32)
        bits = builder.bitcast(value, word)
        upper = builder.lshr(bits, ir.Constant(word, 16))
        odd = builder.and_(upper, ir.Constant(word, 1))
        rounded = builder.add(bits, builder.add(odd, ir.Constant(word, 0x7FFF)))
        return builder.trunc(builder.lshr(rounded, ir.Constant(word, 16)), ir.IntType(16))

    return like.dtype(x, like), generate


_F = np.float32
_LOG2_E = _F(1.4426950408889634)
# ln 2 in two parts: the product of the first with an integer is exact
_LN_2, _LN_2_REST = _F(0.693359375), _F(-2.12194440e-4)
_C0, _C1, _C2, _C3, _C4 = _F(1 / 720), _F(1 / 120), _F(1 / 24), _F(1 / 6), _F(0.5)


@njit(forceinline=True, **FLAGS)
def exp(x):
    """Compute e^x for x up to 88, accurate to 2 units in the last place; below -87 it is e^-87.

    2^n times a short polynomial: unlike a library call, LLVM compiles it into vector instructions.
    """
    x = max(x, _F(-87))
    whole = np.int32(x * _LOG2_E + (_F(0.5) if x > _F(0) else _F(-0.5)))
    rest = x - _F(whole) * _LN_2 - _F(whole) * _LN_2_REST
    series = ((((_C0 * rest + _C1) * rest + _C2) * rest + _C3) * rest + _C4) * rest * rest + rest + _F(1)
    return series * from_bits((whole + np.int32(127)) << np.int32(23))


@intrinsic
def bits_of(typingctx: Any, x: Any) -> tuple[Any, Callable[..., Any]]:
    """Return the bits of an element, widened to those of a float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        (value,) = arguments
        word = ir.IntType(32)
        if x == types.float32:
            return builder.bitcast(value, word)
        return builder.shl(builder.zext(value, word), ir.Constant(word, 16))

    return types.int32(x), generate


_MAGNITUDE, _INFINITY = np.int32(0x7FFFFFFF), np.int32(0x7F800000)


@njit(forceinline=True, **FLAGS)
def _order(x):
    """Return an integer key in the order of x, equal for both zeros, and the largest for NaN.

    It compares bits: arithmetic is compiled as if all numbers were finite.
    """
    bits = bits_of(x)
    size = bits & _MAGNITUDE
    if size > _INFINITY:
        return _MAGNITUDE
    return -size if bits < 0 else size


@njit(forceinline=True, **FLAGS)
def likeliest(x):
    """Return the first index of the largest element of x; -1 if it is not finite, or an element is NaN."""
    most = -_MAGNITUDE
    for d in range(len(x)):
        most = max(most, _order(x[d]))
    if most >= _INFINITY or most <= -_INFINITY:
        return -1
    index = 0
    while _order(x[index]) != most:
        index += 1
    return index


@njit(forceinline=True, **FLAGS)
def rounded(x, like):
    """Round x to the elements of the array `like`, in float32."""
    return widen(narrow(x, like))


@njit(forceinline=True, **FLAGS)
def silu_mul(gate, up, like):
    """Compute silu(gate) * up, rounded as in the models' own code."""
    gate = rounded(gate, like)
    return rounded(gate / (_F(1) + exp(min(-gate, _F(80)))), like) * rounded(up, like)


_GELU, _CUBE = _F(1.5957691216057308), _F(0.044715)  # 2 sqrt(2 / pi)


@njit(forceinline=True, **FLAGS)
def gelu_mul(gate, up, like):
    """Compute gelu(gate) * up by GELU's tanh form, rounded as in the models' own code."""
    gate = rounded(gate, like)
    inner = _GELU * (gate + _CUBE * gate * gate * gate)
    return rounded(gate / (_F(1) + exp(max(min(-inner, _F(80)), _F(-80)))), like) * rounded(up, like)


@njit(forceinline=True, **FLAGS)
def copy_row(to, x):
    """Set to = x in float32, padded with zeros."""
    for d in range(len(x)):
        to[d] = widen(x[d])
    for d in range(len(x), len(to)):
        to[d] = _F(0)


@njit(forceinline=True, **FLAGS)
def _copy_to_norm(to, x, num, eps):
    """Set to = x [num] in float32, padded with zeros. -> the factor of its RMSNorm"""
    for d in range(num, len(to)):
        to[d] = _F(0)
    total = _F(0)
    for d in range(num):
        value = widen(x[d])
        to[d] = value
        total += value * value
    return _F(1) / np.sqrt(total / _F(num) + eps)


@njit(forceinline=True, **FLAGS)
def rms_norm(to, x, weight, num, eps):
    """Set to = RMSNorm of x [num], in float32, padded with zeros; rounded as in the models' own code."""
    factor = _copy_to_norm(to, x, num, eps)
    for d in range(num):
        to[d] = rounded(widen(weight[d]) * rounded(to[d] * factor, x), x)


@njit(forceinline=True, **FLAGS)
def wide_rms_norm(to, x, weight, num, eps):
    """Set to = RMSNorm of x [num], in float32, padded with zeros; rounded once, after the float32 weight."""
    factor = _copy_to_norm(to, x, num, eps)
    for d in range(num):
        to[d] = rounded(weight[d] * (to[d] * factor), x)


@njit(forceinline=True, **FLAGS)
def norm_row(to, x, weight, wide, num, eps):
    """Set to = RMSNorm of x with the weight at an address: float32 if `wide`, else elements of x."""
    if wide != 0:
        wide_rms_norm(to, x, carray(at(weight), num, np.float32), num, eps)
    else:
        rms_norm(to, x, carray(at(weight), num, x.dtype), num, eps)


@njit(forceinline=True, **FLAGS)
def store_row(to, x):
    """Set to = float32 x, rounded to the elements of `to`."""
    for d in range(len(to)):
        to[d] = narrow(x[d], to)


@njit(forceinline=True, **FLAGS)
def rotate(x, cos, sin, half):
    """Rotate the first 2 * half elements of a head in place; rounded as in the models' own code."""
    for d in range(half):
        a, b = widen(x[d]), widen(x[half + d])
        c, s = widen(cos[d]), widen(sin[d])
        x[d] = narrow(rounded(a * c, x) - rounded(b * s, x), x)
        x[half + d] = narrow(rounded(b * c, x) + rounded(a * s, x), x)
