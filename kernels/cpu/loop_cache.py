"""Machine code of the CPU loops on disk, and the processes that compile it before it is needed.

A process that loads a model imports torch and reads weights for seconds. Compiling takes seconds too, so processes of
their own do it meanwhile. Whoever needs a loop that one of them may still compile waits for it. Later processes link
the object code from the cache folder (kernels/disk_cache.py), which is valid for one machine and version of all that
is compiled.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import importlib
import importlib.util
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from graftlm.kernels import disk_cache
from graftlm.kernels.cpu.calls import COLUMNS

T = TypeVar("T")

_KEPT_VERSIONS = 4
"""Folders of other versions of the loops that stay: several environments may share a cache."""
_POLL_S = 0.02
_PATIENCE_S = 0.5
"""How long to wait in silence."""
_TIMEOUT_S = 120.0
"""After so long a loop is compiled here, whatever the other processes do."""


class MachineCode(NamedTuple):
    """Relocatable object code.

    symbol  the name of its function `void (call *)`
    needs   names that it refers to
    """

    symbol: str
    code: bytes
    needs: tuple[str, ...] = ()


class LoopShapes(NamedTuple):
    """What the loops of a model are compiled for.

    group   query heads of a KV head
    capped  whether its attention has a softcap
    """

    group: int
    head_dim: int
    bfloat16: bool
    capped: bool


_processes: list[subprocess.Popen[bytes]] = []
_quiet = True


@functools.cache
def folder() -> Path | None:
    """The cache folder for this version of the loops on this machine; None where nothing can be kept."""
    versions = [sys.version, *(metadata.version(name) for name in ("numba", "llvmlite"))]
    digest = hashlib.sha256(repr((versions, platform.machine(), _processor())).encode())
    for path in sorted(Path(__file__).parent.glob("loops/*.py")) + [Path(__file__).with_name("calls.py")]:
        digest.update(path.read_bytes())
    found = disk_cache.private_folder("cpu-loops", digest.hexdigest()[:16])
    if found is not None:
        disk_cache.trim(found.parent, _KEPT_VERSIONS)
    return found


def _processor() -> str:
    """Model and instruction sets of the processor: a cache folder may be shared by different machines."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return "\n".join(
            sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU "))})
        )
    return platform.processor()


@atexit.register
def _leave() -> None:
    """Let processes that still compile go on for later ones; unasked, Python would warn of each at its end."""
    for process in _processes:
        if process.poll() is None:
            process.returncode = 0


def start(shapes: LoopShapes, *, quiet: bool = False) -> None:
    """Start to compile the loops of a model where they are missing on disk. Returns at once."""
    global _quiet
    if importlib.util.find_spec("numba") is None or not sys.executable or folder() is None:
        return
    _quiet = quiet or not sys.stderr.isatty()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    for part, wanted in PARTS.items():
        if all(path is not None and path.exists() for path in (_path(*one) for one in wanted(shapes))):
            continue
        code = f"from {__name__} import LoopShapes, compile_part; compile_part({part!r}, {shapes!r})"
        with suppress(OSError):
            _processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", code],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            )


def wait_for(load: Callable[[], T | None]) -> T | None:
    """What `load` returns, once it finds something; None if all processes have ended without it."""
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
    """Whether processes still compile loops."""
    _processes[:] = [process for process in _processes if process.poll() is None]
    return bool(_processes)


LOOPS = {
    "decode_attention": "decode_attention",
    "prefill_attention": "prefill_attention",
    "matmul": "matmul",
    "norm": "elementwise",
    "rotation": "elementwise",
    "silu_mul": "elementwise",
    "decoder_layers": "decoder_layers",
}
"""The module of kernels/cpu/loops that compiles a loop, with its function `compile_NAME`."""

Wanted = tuple[str, tuple[int, ...]]
"""A loop and what it is compiled for."""


def _attention(shapes: LoopShapes) -> list[Wanted]:
    group, dim, bfloat16, capped = shapes
    wanted: list[Wanted] = [("decode_attention", (group, dim, dim, bfloat16, capped))]
    if not capped and group <= COLUMNS:
        wanted.append(("prefill_attention", (group, dim, dim, bfloat16)))
    return wanted


def _layers(shapes: LoopShapes) -> list[Wanted]:
    half = shapes.bfloat16
    wanted: list[Wanted] = [("matmul", (half, False)), ("matmul", (half, True))]
    return wanted + [(name, (half,)) for name in ("norm", "rotation", "silu_mul", "decoder_layers")]


PARTS: dict[str, Callable[[LoopShapes], list[Wanted]]] = {"attention": _attention, "layers": _layers}
"""What one process compiles; about the same work each."""


def compile_part(part: str, shapes: LoopShapes) -> None:
    """Compile the loops of a part that are missing in the cache folder."""
    for wanted in PARTS[part](shapes):
        if load(*wanted) is None:
            compile_one(*wanted)


def compile_one(name: str, arguments: tuple[int, ...]) -> MachineCode:
    """Compile a loop with numba, and keep it in the cache folder, if there is one."""
    module = importlib.import_module(f"{__package__}.loops.{LOOPS[name]}")
    compiled: MachineCode = getattr(module, f"compile_{name}")(*arguments)
    path = _path(name, arguments)
    if path is not None:
        names = "\n".join([compiled.symbol, *compiled.needs]).encode()
        parts = {"names": names, "code": compiled.code}
        disk_cache.save_arrays(path, {name: np.frombuffer(part, np.uint8) for name, part in parts.items()})
    return compiled


def load(name: str, arguments: tuple[int, ...]) -> MachineCode | None:
    """A loop from the cache folder; None if it is not there, or damaged."""
    path = _path(name, arguments)
    kept = disk_cache.load_arrays(path) if path is not None else None
    if kept is None:
        return None
    symbol, *needs = kept["names"].tobytes().decode().split("\n")
    return MachineCode(symbol, kept["code"].tobytes(), tuple(needs))


def _path(name: str, arguments: tuple[int, ...]) -> Path | None:
    found = folder()
    return found / f"{name}-{'-'.join(str(int(value)) for value in arguments)}.loop" if found is not None else None
