"""Processes that compile kernels: threads of one process take turns at it, for most of Triton is written in Python."""

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

LONGEST_S = 60.0
"""How long a kernel, or the start of the program, is waited for before it is given up."""

FEWEST_CORES = 4
"""With fewer, processes have no more room than threads."""


class CompileServer:
    """A program beside this one that compiles kernels in forks of itself, into Triton's cache on disk.

    It takes seconds to start, so it is started early, and gets no kernel before one was missing in the cache. Where it
    cannot run, or fails, it compiles nothing, and whoever needs a kernel does.
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
        """End it, with all that it is compiling."""
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
        """Wait until a kernel of ours is compiled, or cannot be compiled here; not if all were in the cache so far.

        specialization  what `function.preload` takes
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
        """Whether it happened; if it takes too long, nothing is asked of the program any more."""
        if not self._gone and not event.wait(LONGEST_S):
            self._leave()
        return not self._gone

    def _look_up(self, *, cache_hit: bool, **rest: Any) -> None:
        """What Triton calls for every kernel that it has compiled or found."""
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
        """Let nobody wait any more."""
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
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "TRITON_CACHE_DIR": knobs.cache.dir,
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",  # what forks has one thread
            "OPENBLAS_NUM_THREADS": "1",
        }
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "graftlm.kernels.jit.compile_worker"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
    except OSError:
        return None
