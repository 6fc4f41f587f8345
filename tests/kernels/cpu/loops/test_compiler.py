"""Loops become object code that a process links without numba."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

from numba import carray

from graftlm.kernels.cpu.compiled import loop_cache, loop_runtime
from graftlm.kernels.cpu.loops.arithmetic import allocate, float_array, release
from graftlm.kernels.cpu.loops.compiler import compile_loop


class Call(ctypes.Structure):
    _fields_ = (("value", ctypes.c_int64),)


def test_scratch_memory_comes_from_the_c_library() -> None:
    def work(pointer):  # type: ignore[no-untyped-def]
        call = carray(pointer, 1)[0]
        memory = allocate(4 * 6)
        ones, place = float_array(memory, (2,))
        others, end = float_array(place, (2, 2))
        ones[0], ones[1], others[1, 1] = 1, 2, 39
        call.value = ones[0] + ones[1] + others[1, 1] + (end - memory - 24)
        release(memory)

    code = compile_loop(Call, work)
    assert {"malloc", "free"} <= set(code.needs)
    call = Call(0)
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(loop_runtime.link(code))(ctypes.addressof(call))
    assert call.value == 42


def test_a_loop_on_disk_is_run_without_numba_or_torch() -> None:
    if loop_cache.load("norm", (0,)) is None:
        loop_cache.compile_one("norm", (0,))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    code = """
import ctypes, sys
import numpy as np
from graftlm.kernels.cpu.calls import NormCall
from graftlm.kernels.cpu.compiled.loop_runtime import loop_address
x, weight, out = np.array([3, 4], np.float32), np.ones(2, np.float32), np.zeros(2, np.float32)
call = NormCall(num_rows=1, size=2, x=x.ctypes.data, weight=weight.ctypes.data, out=out.ctypes.data, out_row=2)
ctypes.CFUNCTYPE(None, ctypes.c_void_p)(loop_address("norm", 0))(ctypes.addressof(call))
assert np.allclose(out, x / np.sqrt(12.5)), out
assert not {"numba", "torch"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
