"""What the compiled loops on a CPU share: how they are called and kept, numbers of two dtypes, a layer's arithmetic.

Elements are float32, or bfloat16 held as uint16. A loop is `void (call *)`: it takes tasks from the call's first field
until none is left, so that any number of threads may run it at once.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import cfunc, from_dtype, njit, types
from numba.core.registry import cpu_target
from numba.core.serialize import dumps
from numba.extending import intrinsic

from graftlm.kernels.cpu.openmp import team

FLAGS: dict[str, Any] = {"fastmath": True, "error_model": "numpy"}
_SOURCE = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]


class Loop:
    """A compiled loop over tasks, and the structure that it is called with."""

    def __init__(self, call: ctypes.Structure, function: int) -> None:
        self.call: Any = call
        self._address = ctypes.addressof(call)
        self._function = function
        self._alone: Callable[[int], None] = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)
        self._team = team()

    def run(self, *, alone: bool = False) -> None:
        """Do all tasks: on torch's threads, or here if there is little to do."""
        self.call.next_task = 0
        threads = torch.get_num_threads()
        if alone or self._team is None or threads == 1:
            self._alone(self._address)
        else:
            self._team(self._function, self._address, threads, 0)


def compiled(call: type[ctypes.Structure], work: Callable[..., Any]) -> int:
    """Address of `work` as machine code, which is kept on disk for later processes where that can be."""
    signature = types.void(types.CPointer(from_dtype(np.dtype(call))))
    work.__qualname__ += f".{_form(work)}"
    try:
        address: int = cfunc(signature, cache=True, **FLAGS)(work).address
    except RuntimeError:  # no folder to keep it in: neither beside the source nor the user's cache
        address = cfunc(signature, **FLAGS)(work).address
    return address


def _form(work: Callable[..., Any]) -> str:
    """What `work` is compiled from beside its own file, by which alone numba sees whether what it kept is stale.

    The variables around it and the processor are in the index of what numba has kept too. But forms that share an index
    can be given the same file by two processes that compile at the same time, and then one would run the other's.
    """
    around = [cell.cell_contents for cell in work.__closure__ or ()]
    processor = cpu_target.target_context.codegen().magic_tuple()
    found = hashlib.sha256(_SOURCE.encode() + dumps(around) + repr(processor).encode())
    return found.hexdigest()[:16]


def element_of(bfloat16: bool) -> tuple[Any, int]:
    """The type of an element, and its bytes."""
    return (np.uint16, 2) if bfloat16 else (np.float32, 4)


def row_address(x: torch.Tensor) -> tuple[int, int, int]:
    """Address of x [num_tokens, heads, dim], and its strides from token to token and from head to head."""
    per_token, per_head, per_element = x.stride()
    assert per_element == 1
    return x.data_ptr(), per_token, per_head


@intrinsic
def take(typingctx: Any, call: Any) -> tuple[Any, Callable[..., Any]]:
    """The next task's number: each is handed out once, to whichever thread asks first."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        counter = builder.bitcast(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", counter, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(call), generate


@intrinsic
def at(typingctx: Any, address: Any) -> tuple[Any, Callable[..., Any]]:
    """The pointer to an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@intrinsic
def from_bits(typingctx: Any, bits: Any) -> tuple[Any, Callable[..., Any]]:
    """The float32 whose bits these are."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


@intrinsic
def widen(typingctx: Any, x: Any) -> tuple[Any, Callable[..., Any]]:
    """float32 of a float32, or of the upper half of one: bfloat16, held as uint16."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        (value,) = arguments
        if x == types.float32:
            return value
        word = ir.IntType(32)
        return builder.bitcast(builder.shl(builder.zext(value, word), ir.Constant(word, 16)), ir.FloatType())

    return types.float32(x), generate


@intrinsic
def narrow(typingctx: Any, x: Any, like: Any) -> tuple[Any, Callable[..., Any]]:
    """float32 in the dtype of the array `like`; to bfloat16 it is rounded to nearest, ties to even."""

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
# ln 2 in two parts: the first has so few bits that its product with a whole number is exact
_LN_2, _LN_2_REST = _F(0.693359375), _F(-2.12194440e-4)
_C0, _C1, _C2, _C3, _C4 = _F(1 / 720), _F(1 / 120), _F(1 / 24), _F(1 / 6), _F(0.5)


@njit(forceinline=True, **FLAGS)
def exp(x):
    """e to the x for x up to 88, to 2 units in the last place; below -87 that of -87.

    2 to a whole number times a short series: unlike a library call it is compiled into vector instructions.
    """
    x = max(x, _F(-87))
    whole = np.int32(x * _LOG2_E + (_F(0.5) if x > _F(0) else _F(-0.5)))
    rest = x - _F(whole) * _LN_2 - _F(whole) * _LN_2_REST
    series = ((((_C0 * rest + _C1) * rest + _C2) * rest + _C3) * rest + _C4) * rest * rest + rest + _F(1)
    return series * from_bits((whole + np.int32(127)) << np.int32(23))


@njit(forceinline=True, **FLAGS)
def rounded(x, like):
    """x as it would be read from the array `like` after it was written there."""
    return widen(narrow(x, like))


@njit(forceinline=True, **FLAGS)
def gated(gate, up, like):
    """silu(gate) * up, rounded where the models' own code rounds."""
    gate = rounded(gate, like)
    return rounded(gate / (_F(1) + exp(min(-gate, _F(80)))), like) * rounded(up, like)


@njit(forceinline=True, **FLAGS)
def load(to, x):
    """to = x, and zeros after its end."""
    for d in range(len(x)):
        to[d] = widen(x[d])
    for d in range(len(x), len(to)):
        to[d] = _F(0)


@njit(forceinline=True, **FLAGS)
def load_normed(to, x, weight, num, eps):
    """to = the RMSNorm of x [num] by `weight`; rounded where the models' own code rounds, zeros after its end."""
    for d in range(num, len(to)):
        to[d] = _F(0)
    total = _F(0)
    for d in range(num):
        value = widen(x[d])
        to[d] = value
        total += value * value
    factor = _F(1) / np.sqrt(total / _F(num) + eps)
    for d in range(num):
        to[d] = rounded(widen(weight[d]) * rounded(to[d] * factor, x), x)


@njit(forceinline=True, **FLAGS)
def turn(x, cos, sin, half):
    """Rotate the first 2 * half elements of x, rounded where the models' own code rounds."""
    for d in range(half):
        a, b = widen(x[d]), widen(x[half + d])
        c, s = widen(cos[d]), widen(sin[d])
        x[d] = narrow(rounded(a * c, x) - rounded(b * s, x), x)
        x[half + d] = narrow(rounded(b * c, x) + rounded(a * s, x), x)
