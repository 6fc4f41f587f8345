"""The cores that this process has, as many threads for torch, and what is done where others take them."""

from __future__ import annotations

import logging
import math
import os
from contextlib import suppress
from pathlib import Path

from graftlm.kernels.cpu.compiled import loop_cache
from graftlm.kernels.cpu.compiled.spinning import SpinControl

log = logging.getLogger("graftlm.engine")

_WINDOW_S = 5.0
"""Seconds of steps that are judged together."""
_MAX_WAITING = 0.3
"""The share of its time that a thread may wait for a core without a line about it."""


def usable_cores(root: Path = Path("/")) -> int:
    """Cores for threads that compute: those the process may run on, one of each pair that shares its arithmetic.

    A container's quota counts, rounded up.

    root  where /proc and /sys are
    """
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    allowed = os.sched_getaffinity(0)
    cores = {_siblings(root, cpu) for cpu in allowed}
    return max(1, math.ceil(min(len(cores), _quota(root))))


def _siblings(root: Path, cpu: int) -> str:
    """The logical processors of the core that `cpu` belongs to, as Linux lists them; its own number if it does not."""
    with suppress(OSError):
        return (root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    return str(cpu)


def _quota(root: Path) -> float:
    """Cores' worth of time that the control groups of this process may use; infinity without a limit."""
    least = math.inf
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            top = root / ("sys/fs/cgroup" if not controllers else "sys/fs/cgroup/cpu")
            group = top / path.lstrip("/")
            for folder in (group, *group.parents):
                least = min(least, _limit(folder))
                if folder == top:
                    break
    return least


def _limit(group: Path) -> float:
    """The limit of one control group, of either version."""
    with suppress(OSError, ValueError):
        quota, period = (group / "cpu.max").read_text().split()
        return int(quota) / int(period) if quota != "max" else math.inf
    with suppress(OSError, ValueError):
        quota_us, period_us = (int((group / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        return quota_us / period_us if quota_us > 0 else math.inf
    return math.inf


def fit_threads() -> None:
    """Let torch use no more threads than there are cores for them: more would wait for one another in every loop."""
    import torch

    cores = usable_cores()
    if torch.get_num_threads() > cores and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(cores)


class CoreContention:
    """Says so, once, where threads of this process wait for cores that others use; meanwhile they sleep, not spin.

    Linux counts how long each thread was ready and did not run. What our own compiler processes take is not judged.
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
        """Count a step that took so long. Called on the thread of the engine."""
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
        """End what was started for the time of contention."""
        self._spin_control.close()

    def _waiting_s(self) -> float:
        """How long the threads of this process have waited for a core so far."""
        total = 0
        with suppress(OSError, ValueError, IndexError):
            for task in self._tasks.iterdir():
                with suppress(FileNotFoundError, ProcessLookupError):
                    total += int((task / "schedstat").read_text().split()[1])
        return total / 1e9
