"""Compiled functions over NumPy arrays: object code that takes Python's array objects, and calls of it.

The machine code reads address and shape in the C structure of each array, so that a call needs neither numba nor a
conversion: 1 us for ten arguments. Arrays that a function makes for itself are allocated with malloc, by code that is
part of the object code. Signatures are numba's, of these types: i1 to i8, u1 to u8 and b1, as scalars or as contiguous
arrays of up to two dimensions; the result is void, a scalar, or a tuple of scalars and arrays.
"""

from __future__ import annotations

import ctypes
import functools
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from graftlm.kernels.cpu.compiled.object_code import MachineCode

_DATA, _SHAPE = 16, 32
"""Offsets in bytes of the address and the address of the shape in an array's C structure."""
_HEADER_BYTES = 64
"""Bytes before an array that a function allocates, for numba's header of it."""


class Kind(NamedTuple):
    """The type of an argument or a result: a NumPy type's code, and its dimensions, 0 for a scalar."""

    code: str
    num_dims: int

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.code)


def kinds_of(signature: str) -> tuple[list[Kind], list[Kind]]:
    """Return the types of the results, none for void, and of the arguments."""
    cut = signature.rindex("(")

    def read(text: str) -> list[Kind]:
        found = re.findall(r"([iub]\d)(\[.*?\])?", text)
        return [Kind(code, dims.count(",") + 1 if dims else 0) for code, dims in found]

    return read(signature[:cut]), read(signature[cut:])


@functools.cache
def reads_arrays() -> bool:
    """Return True if arrays of this interpreter have the C structure that machine code reads."""
    if sys.byteorder != "little" or ctypes.sizeof(ctypes.c_void_p) != 8:
        return False
    array = np.zeros((2, 3), np.int32)
    fields = ctypes.string_at(id(array), _SHAPE + 8)
    data, shape = (int.from_bytes(fields[at : at + 8], "little") for at in (_DATA, _SHAPE))
    return data == array.ctypes.data and ctypes.string_at(shape, 16) == np.array([2, 3], np.int64).tobytes()


def call_of(address: int, signature: str, *, keeps_lock: bool = False) -> Callable[..., Any]:
    """Return the function at `address`, which `compile_function` compiled for `signature`.

    keeps_lock  it keeps Python's lock while it runs

    A call raises ctypes.ArgumentError for a scalar that is not Python's int or bool. Types, dimensions and contiguity
    of arrays are not checked; see `checked`.
    """
    results, arguments = kinds_of(signature)
    several = len(results) > 1
    types: list[Any] = [ctypes.py_object if kind.num_dims else ctypes.c_int64 for kind in arguments]
    result = None if several or not results else ctypes.c_bool if results[0].code == "b1" else ctypes.c_int64
    prototype = ctypes.PYFUNCTYPE if keeps_lock else ctypes.CFUNCTYPE
    function = prototype(result, *types, *([ctypes.py_object] if several else []))(address)
    return functools.partial(_call_for_several, function, results) if several else function


def _call_for_several(function: Callable[..., Any], results: Sequence[Kind], *arguments: Any) -> tuple[Any, ...]:
    """Call `function` and copy the arrays that it returns."""
    out = np.zeros((len(results), 3), np.int64)
    function(*arguments, out)
    return tuple(_taken(kind, *out[i].tolist()) for i, kind in enumerate(results))


def _taken(kind: Kind, address: int, *shape: int) -> Any:
    if not kind.num_dims:
        return address
    dims = shape[: kind.num_dims]
    num_bytes = int(np.prod(dims)) * kind.dtype.itemsize
    copy = np.frombuffer(bytearray(ctypes.string_at(address, num_bytes)), kind.dtype).reshape(dims)
    _free()(address)
    return copy


@functools.cache
def _free() -> Callable[[int], None]:
    free = ctypes.CDLL("ucrtbase" if sys.platform == "win32" else None).free
    free.argtypes, free.restype = [ctypes.c_void_p], None
    return free


def checked(call: Callable[..., Any], signature: str) -> Callable[..., Any]:
    """Return `call` with a check of the types, dimensions and contiguity of its arguments, for tests."""
    _, kinds = kinds_of(signature)

    def checks(*arguments: Any) -> Any:
        assert len(arguments) == len(kinds), (signature, len(arguments))
        for kind, value in zip(kinds, arguments, strict=True):
            if kind.num_dims:
                assert isinstance(value, np.ndarray), (signature, type(value))
                assert (value.dtype, value.ndim) == (kind.dtype, kind.num_dims), (signature, value.dtype, value.shape)
                assert value.flags.c_contiguous and value.flags.aligned, (signature, value.strides)
        return call(*arguments)

    return checks


def compile_function(function: Callable[..., Any], signature: str) -> MachineCode:
    """Compile `function` with numba for this processor, or the one that the environment names.

    Functions that it calls are registered with numba by the caller.
    """
    import llvmlite.binding as llvm
    from numba import njit
    from numba.core.ccallback import CFunc
    from numba.core.compiler_lock import global_compiler_lock
    from numba.core.sigutils import normalize_signature

    llvm.initialize_native_asmparser()
    results, arguments = kinds_of(signature)
    flags = {"error_model": "numpy"}
    work = _adapter(njit(**flags)(function), results, arguments)
    num_words = len(arguments) + (len(results) > 1)
    with global_compiler_lock:
        taken = normalize_signature(f"i8({', '.join(['i8'] * num_words)})")
        function_of_words: Any = CFunc(work, taken, locals={}, options=flags)
        compiled = function_of_words._compile_uncached()
        symbol: str = compiled.fndesc.llvm_cfunc_wrapper_name
        library = compiled.library
        library.get_pointer_to_function(symbol)  # optimises the module
        module = llvm.parse_bitcode(library._final_module.as_bitcode())
        module.link_in(llvm.parse_assembly(_allocator()))
        code: bytes = library._codegen._tm.emit_object(module)
    declared = (x.name for x in (*module.functions, *module.global_variables) if x.is_declaration)
    needs = tuple(sorted(name for name in declared if not name.startswith("llvm.")))
    return MachineCode(symbol, code, needs)


def _adapter(function: Any, results: Sequence[Kind], arguments: Sequence[Kind]) -> Callable[..., Any]:
    """Return a function of words, the addresses of array objects and the values of scalars, that calls `function`."""
    from numba import carray

    from graftlm.kernels.cpu.loops.arithmetic import allocate, at

    names: dict[str, Any] = {"function": function, "carray": carray, "at": at, "allocate": allocate, "word": _word()}
    for kind in (*arguments, *results):
        names[f"t_{kind.code}"] = kind.dtype.type
    values = [_value(f"a{i}", kind) for i, kind in enumerate(arguments)]
    words = [f"a{i}" for i in range(len(arguments))]
    call = f"function({', '.join(values)})"
    if len(results) > 1:
        words.append("out")
        names["t_i8"] = np.int64
        lines = [
            f"{', '.join(f'r{i}' for i in range(len(results)))} = {call}",
            f"slots = carray(at(word(out + {_DATA})), {3 * len(results)}, t_i8)",
        ]
        for i, kind in enumerate(results):
            if kind.num_dims:
                lines += [
                    f"slots[{3 * i}] = allocate(r{i}.size * {kind.dtype.itemsize} + 1)",
                    f"copied{i} = carray(at(slots[{3 * i}]), r{i}.size, t_{kind.code})",
                    f"for row in range(len(r{i})):",
                    f"    copied{i}[row] = r{i}[row]"
                    if kind.num_dims == 1
                    else f"    for d in range(r{i}.shape[1]): copied{i}[row * r{i}.shape[1] + d] = r{i}[row, d]",
                    *(f"slots[{3 * i + 1 + d}] = r{i}.shape[{d}]" for d in range(kind.num_dims)),
                ]
            else:
                lines.append(f"slots[{3 * i}] = r{i}")
        lines.append("return 0")
    else:
        lines = [f"return int({call})"] if results else [call, "return 0"]
    exec("\n    ".join([f"def work({', '.join(words)}):", *lines]), names)
    work: Callable[..., Any] = names["work"]
    return work


def _value(name: str, kind: Kind) -> str:
    """Return the expression of an argument from its word."""
    if not kind.num_dims:
        return f"{name} != 0" if kind.code == "b1" else name
    shape = [f"word(word({name} + {_SHAPE}) + {8 * d})" for d in range(kind.num_dims)]
    return f"carray(at(word({name} + {_DATA})), ({', '.join(shape)},), t_{kind.code})"


def _word() -> Any:
    from llvmlite import ir
    from numba import types
    from numba.extending import intrinsic

    @intrinsic
    def word(typingctx: Any, address: Any) -> tuple[Any, Callable[..., Any]]:
        """Load the 64-bit word at an address."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.load(builder.inttoptr(arguments[0], ir.IntType(64).as_pointer()))

        return types.int64(types.int64), generate

    return word


def _allocator() -> str:
    """Return LLVM assembly of the two functions of numba's runtime that allocate and free arrays.

    Numba's header of an array holds the number of references at 0 and the address of the data at 24.
    """
    from llvmlite import ir

    module, byte, word = ir.Module(), ir.IntType(8), ir.IntType(64)
    pointer = byte.as_pointer()
    malloc = ir.Function(module, ir.FunctionType(pointer, [word]), "malloc")
    free = ir.Function(module, ir.FunctionType(ir.VoidType(), [pointer]), "free")
    make = ir.Function(module, ir.FunctionType(pointer, [word, ir.IntType(32)]), "NRT_MemInfo_alloc_aligned")
    make.linkage = "linkonce_odr"
    builder = ir.IRBuilder(make.append_basic_block())
    size, alignment = make.args[0], builder.zext(make.args[1], word)
    header = builder.call(malloc, [builder.add(size, builder.add(alignment, word(_HEADER_BYTES)))])
    start = builder.ptrtoint(header, word)
    past = builder.add(start, builder.add(alignment, word(_HEADER_BYTES - 1)))
    data = builder.and_(past, builder.neg(alignment))
    builder.store(word(1), builder.inttoptr(start, word.as_pointer()))
    builder.store(data, builder.inttoptr(builder.add(start, word(24)), word.as_pointer()))
    builder.ret(header)
    end = ir.Function(module, ir.FunctionType(ir.VoidType(), [pointer]), "NRT_MemInfo_call_dtor")
    end.linkage = "linkonce_odr"
    builder = ir.IRBuilder(end.append_basic_block())
    builder.call(free, [end.args[0]])
    builder.ret_void()
    return str(module)
