"""Object code of the CPU loops on disk, and the processes that compile it ahead of its use.

The package has object code for common processors and shapes (object_code.py). Separate processes compile missing loops
while the process that loads a model imports torch and reads weights, for seconds. A call that needs a loop waits while
one of these may still compile it. Later processes link the object code from the cache folder (kernels/disk_cache.py),
which is valid for one kind of processor and one version of all sources.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import importlib
import importlib.util
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from graftlm.kernels import disk_cache
from graftlm.kernels.cpu.calls import COLUMNS
from graftlm.kernels.cpu.compiled import object_code
from graftlm.kernels.cpu.compiled.object_code import MachineCode, Wanted
from graftlm.kernels.cpu.element_format import ElementFormat
from graftlm.kernels.cpu.panel_kind import COMMON, Arithmetic
from graftlm.kernels.jit import python_process

T = TypeVar("T")
log = logging.getLogger("graftlm.engine")

_KEPT_VERSIONS = 16
"""Number of folders of other versions to keep, because several environments may share a cache."""
_POLL_S = 0.02
_PATIENCE_S = 0.5
"""Seconds to wait before a line on the terminal."""
_TIMEOUT_S = 120.0
"""Seconds of waiting for other processes after which this process compiles a loop itself."""
_MOST_PROCESSES = 4
"""The largest number of processes: more finish no sooner, since each imports numba and is slower at its first loop."""


class LoopShapes(NamedTuple):
    """The parameters that the loops of a model are compiled for.

    group    query heads of a KV head
    element  format of weights, keys and values
    capped   whether its attention has a softcap
    int8     whether it keeps keys and values in int8
    """

    group: int
    head_dim: int
    element: ElementFormat
    capped: bool
    int8: bool = False


_processes: list[subprocess.Popen[bytes]] = []

LONGEST_S = 600
"""Seconds after which a process that compiles loops ends; it goes on when its parent has ended, even if killed."""

_quiet = True


@functools.cache
def folder(package: str = "") -> Path | None:
    """Return the cache folder for this version of the loops on this machine; None where nothing can be kept.

    package  of the loops; see `object_code.register`
    """
    import llvmlite.binding as llvm

    versions = [sys.version, *(disk_cache.version_of(name) for name in ("numba", "llvmlite"))]
    name, features = object_code.processor()
    what = (object_code.sources(package), versions, llvm.get_process_triple(), name, sorted(features))
    digest = hashlib.sha256(repr(what).encode())
    name = package.rpartition(".")[2] or "cpu"
    found = disk_cache.private_folder(f"{name}-loops", digest.hexdigest()[:16])
    if found is not None:
        disk_cache.trim(found.parent, _KEPT_VERSIONS, found)
    return found


@atexit.register
def _leave() -> None:
    """Detach processes that still compile: they finish for later processes, and Python's exit does not warn of them."""
    for process in _processes:
        if not _has_ended(process):
            python_process.release(process)
            process.returncode = 0


def start(shapes: LoopShapes, *, quiet: bool = False) -> None:
    """Start to compile the loops of a model where they are missing on disk. Returns at once."""
    global _quiet
    if not can_compile():
        return
    _quiet = quiet or not sys.stderr.isatty()
    missing = [one for one in loops_of(shapes) if not is_ready(*one)]
    if missing and not quiet:
        _say_why()
    start_processes(missing, min(os.cpu_count() or 1, _MOST_PROCESSES))


def has_numba() -> bool:
    """Return True if numba is installed."""
    with suppress(ImportError, ValueError):
        return importlib.util.find_spec("numba") is not None
    return False


def can_compile() -> bool:
    """Return True if other processes can compile loops for this one."""
    return has_numba() and bool(sys.executable) and folder() is not None


def start_processes(wanted: list[Wanted], num_processes: int, nice: int = 0) -> None:
    """Start processes that compile `wanted` and keep them in the cache folder. Returns at once."""
    for part in _dealt(wanted, num_processes):
        code = f"from {__name__} import compile_missing; compile_missing({part!r}, {nice})"
        with suppress(OSError):
            _processes.append(
                python_process.start(
                    ("-c", code),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            )


@functools.cache
def _say_why() -> None:
    """Print once that all loops compile here, if the package has no object code for this processor."""
    reason = object_code.why_none()
    if reason is not None:
        log.warning(
            "there is no object code of the CPU kernels for this processor (%s): %s; it is compiled now, which takes "
            "some seconds, and kept for later processes",
            object_code.processor()[0],
            reason,
        )


def wait_for(load: Callable[[], T | None]) -> T | None:
    """Return the first result of `load` that is not None; None if all processes have ended without one."""
    started, shown = time.monotonic(), False
    try:
        while True:
            running = compiling()
            found = load()
            waited = time.monotonic() - started
            if found is not None or not running or waited > _TIMEOUT_S:
                return found
            if waited > _PATIENCE_S and not shown and not _quiet:
                shown = True
                print("graftlm: compiling CPU kernels for this machine, once", end="", file=sys.stderr, flush=True)
            time.sleep(_POLL_S)
    finally:
        if shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def compiling() -> bool:
    """Return True while processes compile loops."""
    _processes[:] = [process for process in _processes if not _has_ended(process)]
    return bool(_processes)


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    if process.poll() is None:
        return False
    if process.stdin is not None:
        process.stdin.close()
    return True


LOOPS = {
    "decode_attention": "decode_attention",
    "decode_attention_int8": "decode_attention",
    "prefill_attention": "prefill_attention",
    "matmul": "matmul",
    "quantised_panel": "quantised_panels",
    "quantised_gather": "quantised_panels",
    "norm": "elementwise",
    "rotation": "elementwise",
    "gate_mul": "elementwise",
    "decoder_layers": "decoder_layers",
    "experts": "experts",
}
"""Loop -> the module of kernels/cpu/loops that compiles it, with its function `compile_NAME`."""

_COSTS = {
    "decoder_layers": 11,
    "decode_attention": 10,
    "decode_attention_int8": 10,
    "prefill_attention": 9,
    "matmul": 6,
    "experts": 6,
    "quantised_panel": 6,
    "rotation": 3,
}
"""Loop -> tenths of a second of its compilation; loops that are not listed take two."""


def loops_of(shapes: LoopShapes) -> list[Wanted]:
    """Return the loops of a model."""
    group, dim, element, capped, int8 = shapes
    wanted: list[Wanted] = [("decode_attention", (group, dim, dim, element, capped))]
    if int8:
        wanted.append(("decode_attention_int8", (group, dim, dim, element, capped)))
    if not capped and group <= COLUMNS:
        wanted.append(("prefill_attention", (group, dim, dim, element)))
    wanted += [("matmul", (element, False)), ("matmul", (element, True))]
    return wanted + [(name, (element,)) for name in ("norm", "rotation", "gate_mul", "decoder_layers")]


def quantised_loops() -> list[Wanted]:
    """Return the loops of quantised weights of the common kinds, in each arithmetic."""
    panels = [
        ("quantised_panel", (int(arithmetic), *kind.arguments))
        for kind in COMMON
        for arithmetic in Arithmetic
        if arithmetic is not Arithmetic.INT8 or (kind.block == 32 and not (kind.bits == 8 and kind.table))
    ]
    return panels + [("quantised_gather", (int(ElementFormat.BFLOAT16), *kind.arguments)) for kind in COMMON]


def _dealt(wanted: list[Wanted], num_parts: int) -> list[list[Wanted]]:
    """Divide `wanted` into at most `num_parts` parts of about equal work."""
    parts: list[list[Wanted]] = [[] for _ in range(num_parts)]
    work = [0] * num_parts
    for one in sorted(wanted, key=_cost, reverse=True):
        least = work.index(min(work))
        parts[least].append(one)
        work[least] += _cost(one)
    return [part for part in parts if part]


def _cost(wanted: Wanted) -> int:
    return _COSTS.get(wanted[0], 2)


def compile_missing(wanted: list[Wanted], nice: int = 0) -> None:
    """Compile the loops that are missing in the cache folder, in a process that ends after LONGEST_S seconds.

    It ends with the process that started it if that one is killed.
    """
    python_process.end_with_starter()
    if hasattr(signal, "alarm"):
        signal.alarm(LONGEST_S)
    if nice and hasattr(os, "nice"):
        os.nice(nice)
    for one in wanted:
        if kept(*one) is None:
            compile_one(*one)


def compile_one(name: str, arguments: tuple[int, ...]) -> MachineCode:
    """Compile a loop with numba, and keep it in the cache folder, if there is one."""
    if name in LOOPS:
        module = importlib.import_module(f"graftlm.kernels.cpu.loops.{LOOPS[name]}")
        compiled: MachineCode = getattr(module, f"compile_{name}")(*arguments)
    else:  # of a registered package
        path_of_module, _, function = name.rpartition(".")
        compiled = getattr(importlib.import_module(path_of_module), function).compile()
    path = _path(name, arguments)
    if path is not None:
        names = "\n".join([compiled.symbol, *compiled.needs]).encode()
        parts = {"names": names, "code": compiled.code}
        disk_cache.save_arrays(path, {name: np.frombuffer(part, np.uint8) for name, part in parts.items()})
    return compiled


def load(name: str, arguments: tuple[int, ...]) -> MachineCode | None:
    """Return a loop from the package or the cache folder; None if it is not there, or damaged."""
    return object_code.packaged((name, arguments)) or kept(name, arguments)


def kept(name: str, arguments: tuple[int, ...]) -> MachineCode | None:
    """Return a loop from the cache folder; None if it is not there, or damaged."""
    path = _path(name, arguments)
    found = disk_cache.load_arrays(path) if path is not None else None
    if found is None:
        return None
    symbol, *needs = found["names"].tobytes().decode().split("\n")
    return MachineCode(symbol, found["code"].tobytes(), tuple(needs))


def is_ready(name: str, arguments: tuple[int, ...]) -> bool:
    """Return True if a loop lies in the package or the cache folder."""
    path = _path(name, arguments)
    return object_code.is_packaged((name, arguments)) or (path is not None and path.exists())


def _path(name: str, arguments: tuple[int, ...]) -> Path | None:
    found = folder(object_code.package_of((name, arguments)))
    return found / f"{object_code.loop_name((name, arguments))}.loop" if found is not None else None
