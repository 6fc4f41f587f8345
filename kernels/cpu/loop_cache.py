"""Machine code of the CPU loops on disk, and the processes that compile it before it is needed.

A process that loads a model imports torch and reads weights for seconds. Compiling takes seconds too, so processes of
their own do it meanwhile. Whoever needs a loop that one of them may still compile waits for it. Later processes load
the machine code from the cache folder (kernels/disk_cache.py), which is valid for one machine and version of all that
is compiled.
"""

from __future__ import annotations

import functools
import hashlib
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

from graftlm.kernels import disk_cache

T = TypeVar("T")

_KEPT_VERSIONS = 4
"""Folders of other versions of the loops that stay: several environments may share a cache."""
_POLL_S = 0.02
_PATIENCE_S = 0.5
"""How long to wait in silence."""
_TIMEOUT_S = 120.0
"""After so long a loop is compiled here, whatever the other processes do."""


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
    for path in sorted(Path(__file__).parent.glob("*.py")):
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


def start(shapes: LoopShapes, *, quiet: bool = False) -> None:
    """Start to compile the loops of a model where they are missing on disk. Returns at once."""
    global _quiet
    if importlib.util.find_spec("numba") is None or not sys.executable or folder() is None:
        return
    _quiet = quiet or not sys.stderr.isatty()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    for part in PARTS:
        if _marker(part, shapes).exists():
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


def _attention(shapes: LoopShapes) -> None:
    from graftlm.kernels.cpu.decode_attention import compile_decode
    from graftlm.kernels.cpu.prefill_attention import COLUMNS, compile_prefill

    group, dim, bfloat16, capped = shapes
    compile_decode(group, dim, dim, bfloat16, capped)
    if not capped and group <= COLUMNS:
        compile_prefill(group, dim, dim, bfloat16)


def _layers(shapes: LoopShapes) -> None:
    from graftlm.kernels.cpu.decode_layer_loops import compile_layers
    from graftlm.kernels.cpu.elementwise import compile_norm, compile_rotation, compile_silu_mul
    from graftlm.kernels.cpu.matmul import compile_matmul

    compile_matmul(shapes.bfloat16, row_major=True)
    compile_matmul(shapes.bfloat16)
    for compile_one in (compile_norm, compile_rotation, compile_silu_mul, compile_layers):
        compile_one(shapes.bfloat16)


PARTS: dict[str, Callable[[LoopShapes], None]] = {"attention": _attention, "layers": _layers}
"""What one process compiles; about the same work each."""


def compile_part(part: str, shapes: LoopShapes) -> None:
    """Compile the loops of a part into the cache folder, and note that they are there."""
    PARTS[part](shapes)
    _marker(part, shapes).touch()


def _marker(part: str, shapes: LoopShapes) -> Path:
    """The file that says that a part is complete."""
    found = folder()
    assert found is not None
    return found / f"{part}-{'-'.join(str(int(value)) for value in shapes)}.complete"
