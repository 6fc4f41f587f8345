"""Run compiled code on torch's own OpenMP threads.

torch keeps one team of OpenMP threads per calling thread; idle threads spin until the next operation. A second thread
pool would compete for the same cores, while the same team starts a call within a few microseconds.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from pathlib import Path

ParallelRegion = Callable[[int, int, int, int], None]
_ENDING = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")


@functools.cache
def torch_library() -> ctypes.CDLL:
    """Return the shared library of torch's CPU operators. Raises OSError if it is not where torch installs it."""
    import torch

    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / f"libtorch_cpu{_ENDING}"))


@functools.cache
def parallel_region() -> ParallelRegion | None:
    """Return GOMP_parallel of the OpenMP library that torch is linked with; None if there is none.

    Takes (address of a function, address of its argument, number of threads, 0) and runs the function once per thread.
    """
    try:
        entry = torch_library().GOMP_parallel  # found through the library's own dependencies
    except (OSError, AttributeError):
        return None
    entry.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    entry.restype = None
    run: ParallelRegion = entry
    return run


@functools.cache
def barrier() -> int:
    """Return the address of GOMP_barrier, at which threads of a parallel region meet; 0 if there is none.

    Outside of a region the function returns at once.
    """
    if parallel_region() is None:
        return 0
    try:
        return ctypes.cast(torch_library().GOMP_barrier, ctypes.c_void_p).value or 0
    except AttributeError:
        return 0
