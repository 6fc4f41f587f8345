"""Kernels compiled in parallel, ahead of the call that would compile them one after the other."""

from __future__ import annotations

import functools
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import ModuleType
from typing import Any

import torch

from graftlm.kernels.gpu.support import triton_problem
from graftlm.kernels.jit.compile_server import CompileServer

MAX_THREADS = 16
_here = threading.local()
_PACKAGE = __name__.partition(".")[0]


class _WarningFilters:
    """The warning filters of the process, kept constant while threads compile.

    Triton changes the filters temporarily at every step, and a thread would restore the state of another thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before: Any = []
        self._content: list[Any] = []

    def keep(self) -> None:
        """Keep the filters until `give_back` has been called as often."""
        with self._lock:
            if not self._users:
                self._before, self._content = warnings.filters, list(warnings.filters)
            self._users += 1

    def give_back(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._before[:] = self._content
                warnings.filters = self._before
                with warnings.catch_warnings():  # resets the registry of warnings shown in the meantime
                    pass


_filters = _WarningFilters()


class _NoLaunches:
    """A context in which kernels are looked up in dry runs, but not launched.

    A loaded kernel would read results that skipped kernels did not write, and could access memory out of bounds.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._run: Any = None

    def __enter__(self) -> None:
        from triton.runtime.jit import JITFunction

        with self._lock:
            self._users += 1
            if self._users > 1:
                return
            launch = self._run = JITFunction.run

            def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
                is_left_out = is_dry() and _is_ours(kernel.module)
                return launch(kernel, *args, grid=grid, warmup=warmup or is_left_out, **options)

            JITFunction.run = run

    def __exit__(self, *_: object) -> None:
        from triton.runtime.jit import JITFunction

        with self._lock:
            self._users -= 1
            if not self._users:
                JITFunction.run = self._run


_no_launches = _NoLaunches()


@functools.cache
def load_launchers_apart() -> None:
    """Let Triton return a module of its own for each launcher that it loads; once a process is enough.

    Triton up to 3.6 compiles a C extension for each signature of a kernel, all of one module name. CPython fills the
    one module of `sys.modules` anew when such a file is loaded again, and a thread can take the launcher of another
    thread's kernel from it: the launch then fails with "function takes exactly 22 arguments (59 given)".
    """
    try:
        from triton.runtime import build
    except ImportError:
        return
    load = getattr(build, "_load_module_from_path", None)
    if load is None:
        return
    lock = threading.Lock()

    def load_apart(name: str, path: str) -> ModuleType:
        with lock:
            apart = ModuleType(name)
            apart.__dict__.update(vars(load(name, path)))
            return apart

    build._load_module_from_path = load_apart


class Compiling:
    """Kernels that threads compile in the background. None of them may be launched before `wait` has returned.

    server  compiles for the threads; None compiles in the threads
    """

    def __init__(
        self, kernels: Sequence[tuple[Any, str]], device: torch.device, server: CompileServer | None = None
    ) -> None:
        self._kernels = len(kernels)
        self._pool: ThreadPoolExecutor | None = None
        if not kernels:
            return
        load_launchers_apart()
        index = torch.cuda.current_device() if device.index is None else device.index
        threads = min(len(kernels), MAX_THREADS, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(
            threads, "graftlm compile", initializer=torch.cuda.set_device, initargs=(index,)
        )
        for function, specialization in reversed(kernels):  # a start launches the slowest kernels last
            _filters.keep()
            done = self._pool.submit(_compile, function, specialization, server)
            done.add_done_callback(lambda _: _filters.give_back())
        self._pool.shutdown(wait=False)

    def wait(self) -> int:
        """Wait for all kernels. -> number of kernels"""
        if self._pool is not None:
            self._pool.shutdown()
        return self._kernels


def compile_meanwhile(
    run: Callable[[], object], device: torch.device, server: CompileServer | None = None
) -> Compiling:
    """Start to compile the kernels that `run` launches on `device`, in threads, or in the processes of `server`.

    `run` is called once, with every launch of our kernels skipped: its results are undefined, and its exceptions are
    suppressed, as are failures to compile, since the real call raises them again. Without Triton this does nothing.
    """
    wanted = _Wanted()
    if triton_problem(device) is None:
        from triton import knobs

        before = knobs.runtime.jit_cache_hook
        knobs.runtime.jit_cache_hook, _here.dry = wanted, True
        try:
            with suppress(Exception), _no_launches:
                run()
        finally:
            knobs.runtime.jit_cache_hook, _here.dry = before, False
    return Compiling(list(wanted.kernels.values()), device, server)


def is_dry() -> bool:
    """Return True if this thread is in a dry run of `compile_meanwhile`, whose results are undefined."""
    return getattr(_here, "dry", False)


def compile_together(run: Callable[[], object], device: torch.device) -> int:
    """Compile the kernels that `run` launches and wait for them. -> number of kernels"""
    return compile_meanwhile(run, device).wait()


class _Wanted:
    """A hook of Triton before the compilation of a kernel: on its own thread it records the kernel and declines."""

    def __init__(self) -> None:
        self.kernels: dict[tuple[str, Any], tuple[Any, str]] = {}
        self._thread = threading.get_ident()

    def __call__(self, *, key: Any, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        if threading.get_ident() != self._thread or not _is_ours(fn.module):
            return False
        self.kernels.setdefault((fn.name, key), (fn.jit_function, compile["specialization_data"]))
        return True


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == _PACKAGE


def _compile(function: Any, specialization: str, server: CompileServer | None) -> None:
    with suppress(Exception):
        if server is not None:
            server.compile(function, specialization)
        assert function.preload(specialization).run  # accessing `run` compiles the launcher
