"""SpinControl: OpenMP's threads sleep instead of spinning while other processes compete for their cores.

Between two parallel regions OpenMP's threads spin for milliseconds, which saves wake-ups if every thread has a core. If
another process has one of the cores, a thread spins for a thread that cannot run, until its time slice ends: on two
cores steps took 6 to 40 times as long beside one or two busy processes, 2 to 3 times with threads that sleep.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
import weakref
from io import FileIO

from graftlm.kernels.cpu.compiled.openmp import parallel_region, torch_library

BEGIN, END = 0.25, 0.18
"""Shares of time that a thread waits for a core: contention begins at the first and ends below the second."""
LOOK_S, WINDOW_S = 0.02, 0.05
"""Seconds between two checks, and least seconds of running and waiting for one measurement."""


class SpinControl:
    """The monitor of the thread that calls `look` and starts parallel regions. Only Linux reports a thread's waits."""

    def __init__(self) -> None:
        self.sleeps = False
        self._next = 0.0
        self._file: FileIO | None = None
        self._thread = 0
        self._run = self._waited = 0
        self._team: threading.Thread | None = None
        self._ended = threading.Event()

    def look(self) -> None:
        """Compare this thread's times of running and of waiting for a core: a few microseconds, every LOOK_S."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + LOOK_S
        times = self._times()
        if times is None:
            self._next = float("inf")
            return
        run, waited = times[0] - self._run, times[1] - self._waited
        if run + waited < WINDOW_S * 1e9:
            return
        self._run, self._waited = times
        share = waited / (run + waited)
        if not self.sleeps and share >= BEGIN:
            self._begin()
        elif self.sleeps and share < END:
            self._end()

    def _times(self) -> tuple[int, int] | None:
        """Return the nanoseconds that this thread ran and waited for a core; None if unsupported."""
        thread = threading.get_native_id()
        try:
            if thread != self._thread:
                if self._file is not None:
                    self._file.close()
                self._file = FileIO(f"/proc/self/task/{thread}/schedstat")
                weakref.finalize(self, self._file.close)
                self._thread = thread
                self._run, self._waited = self._read()
            return self._read()
        except (OSError, ValueError):
            return None

    def _read(self) -> tuple[int, int]:
        assert self._file is not None
        self._file.seek(0)
        run, waited, _ = self._file.read(96).split()
        return int(run), int(waited)

    def _begin(self) -> None:
        """Start one more team, which idles: OpenMP's threads sleep at once if there are more threads than cores."""
        self.sleeps = True
        region = parallel_region()
        if region is None:
            return
        self._ended = threading.Event()
        weakref.finalize(self, self._ended.set)
        function = ctypes.cast(torch_library().omp_get_max_threads, ctypes.c_void_p).value or 0
        self._team = threading.Thread(
            target=_keep_team, args=(function, self._ended), name="graftlm idle team", daemon=True
        )
        self._team.start()

    def _end(self) -> None:
        """End the team with its thread."""
        self.sleeps = False
        self._ended.set()

    def close(self) -> None:
        """End the team, and wait until it has ended."""
        self._end()
        if self._team is not None:
            self._team.join()


def _keep_team(function: int, ended: threading.Event) -> None:
    from torch import get_num_threads

    region = parallel_region()
    assert region is not None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    region(function, 0, max(2, cores - get_num_threads() + 2), 0)
    ended.wait()
