"""The usable cores of this process, and the number of torch's threads."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path


def usable_cores(root: Path = Path("/")) -> int:
    """Return the number of cores for compute threads: the allowed cores, one of each pair of hyper-threads.

    A container's quota counts, rounded up.

    root  the folder of /proc and /sys
    """
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    allowed = os.sched_getaffinity(0)
    cores = {_siblings(root, cpu) for cpu in allowed}
    return max(1, math.ceil(min(len(cores), _quota(root))))


def _siblings(root: Path, cpu: int) -> str:
    """Return Linux's list of the logical processors of `cpu`'s core; the number of `cpu` without one."""
    with suppress(OSError):
        return (root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    return str(cpu)


def _quota(root: Path) -> float:
    """Return the limit of the control groups of this process in cores; infinity without a limit."""
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
    """Return the limit of one control group, of either version."""
    with suppress(OSError, ValueError):
        quota, period = (group / "cpu.max").read_text().split()
        return int(quota) / int(period) if quota != "max" else math.inf
    with suppress(OSError, ValueError):
        quota_us, period_us = (int((group / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        return quota_us / period_us if quota_us > 0 else math.inf
    return math.inf


def fit_threads(num_processes: int = 1) -> None:
    """Limit torch's threads to the usable cores: more threads would wait for one another in every loop.

    num_processes  that compute at the same time, and share the cores
    """
    import torch

    cores = max(1, usable_cores() // num_processes)
    if torch.get_num_threads() > cores and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(cores)
