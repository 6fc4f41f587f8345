"""What GraftLM runs on: versions, processors, memory."""

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
"""So much use of a core leaves it idle: a desktop is never quite still."""


def version_of(package: str) -> str | None:
    """The installed version; None if there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def processor() -> str:
    """The processor's own name where the system tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def num_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def busy_core_seconds() -> float:
    """CPU time that all processes of this machine have used, with what other virtual machines took of its cores."""
    import psutil

    times = psutil.cpu_times()._asdict()
    return float(sum(times.get(name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal")))


def idle_cores(seconds: float = 0.5) -> int:
    """Cores this process may use that other programs leave idle while it looks on for some seconds; at least 1."""
    before, started = busy_core_seconds(), time.perf_counter()
    time.sleep(seconds)
    busy = (busy_core_seconds() - before) / (time.perf_counter() - started)
    return cores_left(num_cores(), os.cpu_count() or 1, busy)


def cores_left(own: int, cores: int, busy: float) -> int:
    """The whole cores left of `own`, on a machine with `cores` of which `busy` are used on average."""
    return max(1, min(own, math.floor(cores - busy + SLIGHT)))


def describe() -> dict[str, Any]:
    """Everything of the above; loads torch to ask for devices."""
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
