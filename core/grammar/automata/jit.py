"""The hot loops: machine code by numba as soon as it is there, the same functions in Python until then.

Compiling takes many seconds, which no request waits for. Soon after the first use in a process a thread loads the
machine code that this machine keeps on disk. Where there is none, a process of its own compiles all loops and keeps
them there; meanwhile, and where numba is not installed, the functions run as Python. A process without constraints
never imports numba, which takes half a second and 60 MiB.

    @inner            a function that loops call
    @loop("signature")   a loop that Python calls
"""

from __future__ import annotations

import atexit
import hashlib
import importlib
import importlib.util
import logging
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeAlias, TypeVar

import numpy as np

from graftlm.core.interpreter_exit import EXIT_WAIT_S, end_llvm
from graftlm.kernels import disk_cache

if TYPE_CHECKING:
    import numpy.typing as npt

Int32Array: TypeAlias = "npt.NDArray[np.int32]"
P = ParamSpec("P")
T = TypeVar("T")

_GRAMMAR = "graftlm.core.grammar"
_MODULES = tuple(
    f"{_GRAMMAR}.{name}"
    for name in (
        *("automata.state_sets", "automata.determinize", "automata.distances", "automata.state_table"),
        *("automata.nfa.arrays", "automata.products.pairs"),
        *("automata.stack.call_sites", "automata.stack.call_conflicts", "automata.stack.rule_distances"),
        "schema.text.name_trie",
        *("masks.trie.trie", "masks.walks.trie_walk", "masks.walks.stack_walk", "masks.walks.self_loops"),
        *("masks.walks.escapes", "masks.spelling", "masks.rows.packed_row"),
    )
)
_KEPT_VERSIONS = 16
"""Versions of the loops that are kept, because several environments may share a cache; each takes less than 1 MB."""
_COMPILE_S = 300.0
_PAUSE_S = 0.2
"""Seconds from the first use to the import of numba, which would take Python's lock from the first constraint."""

log = logging.getLogger("graftlm.grammar")

_loops: list[Loop[..., Any]] = []
_inner: list[Callable[..., object]] = []
_lock = threading.Lock()
_awaited = threading.Event()
"""Set by whoever waits for the loops: then there is no pause."""
_thread: threading.Thread | None = None
_at_work = threading.Lock()
"""Held while modules are imported and loops compiled, which neither a fork nor the interpreter's exit may cut short."""
_forking = threading.local()
_exiting = False


class Loop(Generic[P, T]):
    """A function that is replaced by its machine code once that is loaded."""

    def __init__(self, function: Callable[P, T], signature: str, *, quick: bool = False) -> None:
        self.python = function
        self.signature = signature
        self.quick = quick
        self.machine_code: Callable[P, T] | None = None
        self.__doc__ = function.__doc__

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        if self.machine_code is not None:
            return self.machine_code(*args, **kwargs)
        prepare()
        return self.python(*args, **kwargs)

    def compile(self, *, cache: bool) -> None:
        """Compile, or load the machine code from numba's cache."""
        njit = importlib.import_module("numba").njit
        self.machine_code = njit(self.signature, cache=cache, nogil=not self.quick)(self.python)


def inner(function: Callable[P, T]) -> Callable[P, T]:
    """Let loops call `function`; in Python it stays what it is."""
    _inner.append(function)
    return function


def loop(signature: str, *, quick: bool = False) -> Callable[[Callable[P, T]], Loop[P, T]]:
    """Compile the function for arguments of these numba types.

    quick  the loop takes microseconds and keeps Python's lock: whoever gives it away waits up to 5 ms to get it back.
    """

    def wrap(function: Callable[P, T]) -> Loop[P, T]:
        found = Loop(function, signature, quick=quick)
        _loops.append(found)
        return found

    return wrap


def prepare() -> None:
    """Load the machine code after a pause, and compile it where it is missing; returns at once."""
    global _thread
    if _thread is None:
        with _lock:
            if _thread is None:
                _thread = threading.Thread(target=_load, name="graftlm grammar loops", daemon=True)
                _thread.start()


def wait() -> None:
    """Wait until the loops are machine code, or will not be."""
    _awaited.set()
    prepare()
    assert _thread is not None
    _thread.join()


@atexit.register
def _exit() -> None:
    global _exiting
    _exiting = True
    if _at_work.acquire(timeout=EXIT_WAIT_S):
        _at_work.release()
    end_llvm()


def _before_fork() -> None:
    _forking.waited = _at_work.acquire(timeout=EXIT_WAIT_S)


def _after_fork() -> None:
    if _forking.waited:
        _at_work.release()


def _forget() -> None:
    """In a forked child the thread does not run; what it had not loaded is loaded by another one."""
    global _at_work, _awaited, _lock, _thread
    _at_work, _awaited, _lock = threading.Lock(), threading.Event(), threading.Lock()
    if any(one.machine_code is None for one in _loops):
        _thread = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_forget)


def _load() -> None:
    if not _has_numba():
        log.warning("numba is not installed: automata and masks of constraints are made in Python, slowly")
        return
    _awaited.wait(_PAUSE_S)
    try:
        folder = _folder()
        if folder is not None and not disk_cache.is_intact(folder) and not _compile_elsewhere(folder):
            folder = None
        if folder is not None:
            disk_cache.trim(folder.parent, _KEPT_VERSIONS + 1, folder)  # and the lock
        _compile_all(folder)
    except Exception:
        if threading.main_thread().is_alive():  # else the process is ending, and nothing can be imported any more
            log.warning("the loops of grammars cannot be compiled, and run as Python: slowly", exc_info=True)


def _has_numba() -> bool:
    with suppress(ImportError, ValueError):
        return importlib.util.find_spec("numba") is not None
    return False


def _folder() -> Path | None:
    """The folder that keeps this version of the loops, compiled for this processor."""
    parent = disk_cache.private_folder("loops")
    if parent is None:
        return None
    digest = hashlib.sha256(repr((sys.version, metadata.version("numba"), metadata.version("llvmlite"))).encode())
    digest.update(repr((platform.machine(), platform.node(), _processor())).encode())
    for name in _MODULES:
        path = Path(__file__).parents[1].joinpath(*name.removeprefix(f"{_GRAMMAR}.").split(".")).with_suffix(".py")
        found = path.stat()
        digest.update(repr((str(path), found.st_mtime_ns, found.st_size)).encode())
    return parent / digest.hexdigest()[:16]


def _processor() -> str:
    """The kind of processor: machine code for one may not run on another that shares the home folder."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        named = ("model name", "flags", "Features", "CPU ")
        return "\n".join(sorted({line for line in lines if line.startswith(named)}))
    return platform.processor()


def _compile_elsewhere(folder: Path) -> bool:
    """Compile in a process of its own, at low priority. -> whether `folder` is there now"""
    if not sys.executable:
        return False
    code = f"from {__name__} import compile_into; compile_into({str(folder)!r})"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with suppress(OSError, subprocess.SubprocessError):
        subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_COMPILE_S,
        )
    return disk_cache.is_intact(folder)


def compile_into(folder: str) -> None:
    """Compile all loops and publish them as `folder`; one process of this machine at a time does so."""
    path = Path(folder)
    with suppress(AttributeError, OSError):
        os.nice(5)
    with open(path.with_name(".lock"), "w") as lock:
        with suppress(ImportError, OSError):
            importlib.import_module("fcntl").flock(lock, 2)
        if not disk_cache.is_intact(path):
            disk_cache.publish(path, _compile_all)


def _compile_all(folder: Path | None) -> None:
    """Compile all loops, or load them from `folder`."""
    with _at_work:
        if _exiting:
            return
        for name in _MODULES:
            importlib.import_module(name)
        importlib.import_module("numba")  # waits for a thread that imports it, which an import of a submodule does not
        config: Any = importlib.import_module("numba.core.config")
        register_jitable = importlib.import_module("numba.extending").register_jitable
        while _inner:
            register_jitable(_inner.pop())
    before = config.CACHE_DIR
    try:
        if folder is not None:
            config.CACHE_DIR = str(folder)
        for one in [one for one in _loops if one.machine_code is None]:
            with _at_work:
                if _exiting:
                    return
                one.compile(cache=folder is not None)
    finally:
        config.CACHE_DIR = before
