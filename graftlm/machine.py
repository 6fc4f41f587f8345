"""What GraftLM runs on: versions, processors, memory."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch", "triton", "transformers", "langchain-core", "dspy", "llama-index-core", "guidance", "flashinfer-python",
)  # fmt: skip


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
