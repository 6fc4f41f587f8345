"""Where there is a GPU the kernels run on it; without one in Triton's interpreter, and tests marked `gpu` are skipped.

`python -m pytest -m gpu` runs what needs a GPU and looks only where such tests are, so that it needs no more than
PyTorch, transformers, Triton and pytest.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
GPU_FOLDERS = ("gpu", "kernels")

if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # it must be chosen before a kernel is imported
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic products ask for


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    inside = collection_path.relative_to(Path(__file__).parent).parts if collection_path.suffix == ".py" else ()
    other = len(inside) > 0 and inside[0] not in GPU_FOLDERS
    return True if other and config.getoption("markexpr") == "gpu" else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HAS_GPU and item.path.parent.name == "kernels":
            item.add_marker(pytest.mark.gpu)
        if item.get_closest_marker("gpu") is None:
            continue
        if HAS_GPU:  # its packages may be older or newer than those that are pinned for development
            item.add_marker(pytest.mark.filterwarnings("default::DeprecationWarning", "default::FutureWarning"))
        else:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
