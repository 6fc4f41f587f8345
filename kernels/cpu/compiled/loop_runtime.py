"""Compiled loops ready to run: machine code from disk or fresh from the compiler, on torch's threads.

A loop is a C function `void (call *)`. All its arguments are fields of one ctypes structure (calls.py), whose first
field counts tasks: each thread takes the next task until none is left, so any number of threads may run the loop.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from graftlm.kernels.cpu.compiled import loop_cache
from graftlm.kernels.cpu.compiled.object_code import MachineCode
from graftlm.kernels.cpu.compiled.openmp import parallel_region

if TYPE_CHECKING:
    import torch

_LIBRARY_CALLS = ("logf", "memcpy", "memmove", "memset")
"""Functions of the C library that LLVM may call although no source names them."""

_lock = threading.Lock()
_engines: list[object] = []
"""The owners of the machine code, alive until the process ends."""


class Loop:
    """A compiled loop and the structure it is called with."""

    def __init__(self, call: ctypes.Structure, function: int) -> None:
        from torch import get_num_threads

        self.call: Any = call
        self._address = ctypes.addressof(call)
        self._function = function
        self._run_here: Callable[[int], None] = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)
        self._parallel_region = parallel_region()
        self._num_threads = get_num_threads

    def run(self, *, single_thread: bool = False) -> None:
        """Run all tasks on torch's threads, or on one: for work that ends before a second thread would start."""
        self.call.next_task = 0
        threads = self._num_threads()
        if single_thread or self._parallel_region is None or threads == 1:
            self._run_here(self._address)
        else:
            self._parallel_region(self._function, self._address, threads, 0)


@functools.cache
def loop_address(name: str, *arguments: int) -> int:
    """Return the address of the loop `name` of loop_cache.LOOPS for these arguments.

    Waits for the processes that compile loops ahead of their use, if one of them may compile this loop.
    """
    with _lock:
        found = loop_cache.wait_for(lambda: loop_cache.load(name, arguments))
        return link(found or loop_cache.compile_one(name, arguments))


def link(machine_code: MachineCode) -> int:
    """Load object code into this process; needs llvmlite, but neither numba nor a linker. -> address of its function"""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple()
    machine = target.create_target_machine(codemodel="jitdefault", jit=True)
    for name in {*machine_code.needs, *_LIBRARY_CALLS}:
        if llvm.address_of_symbol(name) is None:
            llvm.add_symbol(name, _address_of(name))
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(machine_code.code))
    engine.finalize_object()
    _engines.append(engine)
    address: int = engine.get_function_address(machine_code.symbol)
    return address


def _address_of(name: str) -> int:
    """Return the address of a function of Python or of the C library.

    A function of numba's runtime would handle exceptions, which no loop raises; its address here ends the process.
    """
    for library in (ctypes.pythonapi, ctypes.CDLL("ucrtbase" if sys.platform == "win32" else None)):
        if hasattr(library, name):
            return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
    return ctypes.cast(ctypes.pythonapi.Py_FatalError, ctypes.c_void_p).value or 0


def row_address(x: torch.Tensor) -> tuple[int, int, int]:
    """Return the address of x [num_tokens, heads, dim], and its strides of tokens and of heads, in elements."""
    per_token, per_head, per_element = x.stride()
    assert per_element == 1
    return x.data_ptr(), per_token, per_head
