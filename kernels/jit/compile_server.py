"""Processes that compile kernels: threads of one process would take turns, for most of Triton is written in Python."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from itertools import count
from typing import Any, Self

from graftlm.kernels.jit import python_process

LONGEST_S = 60.0
"""Seconds to wait for a kernel, or for the start of the server, before giving up."""

FEWEST_CORES = 4
"""The least number of cores: with fewer, processes are no faster than threads."""


class CompileServer:
    """A server process that compiles kernels in forks of itself, into Triton's cache on disk.

    It takes seconds to start, hence it starts early, and receives no kernel before one is missing in the cache. If it
    cannot run, or fails, it compiles nothing, and each kernel compiles at its first launch.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = count()
        self._waiting: dict[int, threading.Event] = {}
        self._ready = threading.Event()
        self._missed = self._gone = False
        self._listener: Any = None
        self._process = _start()
        if self._process is None:
            self._leave()
            return
        from triton import knobs

        self._listener, knobs.compilation.listener = knobs.compilation.listener, self._look_up
        threading.Thread(target=self._read, args=(self._process,), name="graftlm compile", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the server and its forks."""
        self._leave()
        if self._process is None:
            return
        from triton import knobs

        if knobs.compilation.listener == self._look_up:
            knobs.compilation.listener = self._listener
        with suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()

    def compile(self, function: Any, specialization: str) -> None:
        """Wait until a kernel is compiled, or compilation has failed; return at once while all were in the cache.

        specialization  the argument of `function.preload`
        """
        if not self._missed or not self._waited_for(self._ready):
            return
        from triton.runtime import driver

        target = driver.active.get_current_target()
        done = threading.Event()
        with self._lock:
            number = next(self._numbers)
            self._waiting[number] = done
        job = {
            "number": number,
            "module": function.module,
            "name": function.fn.__name__,
            "specialization": specialization,
            "target": [target.backend, target.arch, target.warp_size],
        }
        try:
            with self._lock:
                assert self._process is not None and self._process.stdin is not None
                self._process.stdin.write(json.dumps(job) + "\n")
                self._process.stdin.flush()
        except (OSError, ValueError):
            return
        self._waited_for(done)

    def _waited_for(self, event: threading.Event) -> bool:
        """Return True if `event` is set in time; otherwise stop sending jobs to the server."""
        if not self._gone and not event.wait(LONGEST_S):
            self._leave()
        return not self._gone

    def _look_up(self, *, cache_hit: bool, **rest: Any) -> None:
        """Receive Triton's notice of a compiled or cached kernel."""
        self._missed |= not cache_hit
        if self._listener is not None:
            self._listener(cache_hit=cache_hit, **rest)

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with suppress(OSError, ValueError):
            for line in process.stdout:
                if line == "ready\n":
                    self._ready.set()
                else:
                    self._waiting[int(line)].set()
        self._leave()

    def _leave(self) -> None:
        """Release all waiting threads."""
        self._gone = True
        for event in (self._ready, *list(self._waiting.values())):
            event.set()


def _start() -> subprocess.Popen[str] | None:
    if not hasattr(os, "fork") or getattr(sys, "frozen", False) or not sys.executable:
        return None
    if len(os.sched_getaffinity(0)) < FEWEST_CORES:
        return None
    from triton import knobs

    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    try:
        environment |= {
            "TRITON_CACHE_DIR": knobs.cache.dir,
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",  # a process that forks must have one thread
            "OPENBLAS_NUM_THREADS": "1",
        }
        return python_process.start(
            ("-m", "graftlm.kernels.jit.compile_worker"),
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
    except OSError:
        return None
