"""Versions, processors and memory of this machine."""

from __future__ import annotations

import math
import os
import platform
import time
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch", "triton", "transformers", "langchain-core", "dspy", "llama-index-core", "guidance", "flashinfer-python",
)  # fmt: skip
SLIGHT = 0.25
"""Use of a core, in cores, below which it counts as idle: desktops always have some load."""


def version_of(package: str) -> str | None:
    """Return the installed version; None for a package that is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def processor() -> str:
    """Return the processor's name, or its architecture if the system has no name."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def busy_core_seconds() -> float:
    """Return the CPU seconds of all processes of this machine, with the time that other virtual machines took."""
    import psutil

    times = psutil.cpu_times()._asdict()
    return float(sum(times.get(name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal")))


def idle_cores(seconds: float = 0.5) -> int:
    """Return the number of this process's cores that other programs leave idle, at least 1; measures for `seconds`."""
    before, started = busy_core_seconds(), time.perf_counter()
    time.sleep(seconds)
    busy = (busy_core_seconds() - before) / (time.perf_counter() - started)
    return cores_left(num_cores(), os.cpu_count() or 1, busy)


def cores_left(own: int, cores: int, busy: float) -> int:
    """Return the number of whole cores left of `own`, on a machine with `cores` of which `busy` are used on average."""
    return max(1, min(own, math.floor(cores - busy + SLIGHT)))


def describe() -> dict[str, Any]:
    """Return all properties of the machine; loads torch to find devices."""
    import psutil
    import torch

    sprout = Path(__file__).parent / "sprout"
    weights = sorted(sprout.glob("*.safetensors"))
    return {
        "graftlm": version_of("graftlm"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "processor": processor(),
        "cores": num_cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "threads": torch.get_num_threads(),
        **{package: version_of(package) for package in PACKAGES},
        "sprout": f"{sum(path.stat().st_size for path in weights) / 2**20:.1f} MiB" if weights else None,
    }
