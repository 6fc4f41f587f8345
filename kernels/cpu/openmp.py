"""Run compiled code on the threads that torch computes with.

torch keeps a team of OpenMP threads per calling thread, which wait for the next operation by spinning. A second pool
beside it would fight for the same cores; the same team takes a call in a few microseconds.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from pathlib import Path

import torch

Entry = Callable[[int, int, int, int], None]
_ENDING = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")


@functools.cache
def torch_library() -> ctypes.CDLL:
    """The library that torch computes with on a CPU. Raises OSError if it does not lie where it should."""
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / f"libtorch_cpu{_ENDING}"))


@functools.cache
def team() -> Entry | None:
    """OpenMP's own entry into a parallel region, of the library that torch was linked with; None if there is none.

    Takes (address of a function, address it is called with on every thread, number of threads, 0).
    """
    try:
        entry = torch_library().GOMP_parallel  # found in what the library depends on
    except (OSError, AttributeError):
        return None
    entry.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    entry.restype = None
    run: Entry = entry
    return run
