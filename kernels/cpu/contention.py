"""CoreContention: the reaction to other processes on the cores of this one."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

from graftlm.kernels.cpu.compiled import loop_cache
from graftlm.kernels.cpu.compiled.spinning import SpinControl

log = logging.getLogger("graftlm.engine")

_WINDOW_S = 5.0
"""Seconds of steps of one measurement."""
_MAX_WAITING = 0.3
"""The share of its time that a thread may wait for a core without a warning."""


class CoreContention:
    """The detector of contention for cores: it warns once, and lets threads sleep instead of spinning meanwhile.

    Linux reports the time that each thread was ready and did not run. Time of our own compiler processes is excluded.
    """

    def __init__(self, tasks: Path = Path("/proc/self/task")) -> None:
        from torch import get_num_threads

        self._num_threads = get_num_threads()
        self._spin_control = SpinControl()
        self._tasks = tasks
        self._told = not tasks.is_dir()
        self._computed_s = 0.0
        self._waited_s = self._waiting_s()

    def add(self, step_s: float) -> None:
        """Count a step of this duration. Called on the thread of the engine."""
        self._spin_control.look()
        self._computed_s += step_s
        if self._told or self._computed_s < _WINDOW_S:
            return
        computed_s, before_s = self._computed_s, self._waited_s
        self._computed_s, self._waited_s = 0.0, self._waiting_s()
        waited_s = self._waited_s - before_s
        if waited_s < _MAX_WAITING * computed_s * self._num_threads or loop_cache.compiling():
            return
        self._told = True
        log.warning(
            "in %.0f s of steps the threads of this process waited %.0f s for a core, because other work runs on the "
            "%d cores that they use; stop it, or give this process cores of its own (taskset, a container's cpuset)",
            computed_s,
            waited_s,
            self._num_threads,
        )

    def close(self) -> None:
        """End the spin control."""
        self._spin_control.close()

    def _waiting_s(self) -> float:
        """Return the seconds that the threads of this process have waited for a core so far."""
        total = 0
        with suppress(OSError, ValueError, IndexError):
            for task in self._tasks.iterdir():
                with suppress(FileNotFoundError, ProcessLookupError):
                    total += int((task / "schedstat").read_text().split()[1])
        return total / 1e9
