"""Tiny models start in a moment and need one thread, so that several workers can test at once (`-n 8`)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from graftlm.core.execution import cuda_graphs


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """For the references, which run on the CPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def few_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "LADDER", (1, 2, 4, 8, 16))
    monkeypatch.setattr(cuda_graphs, "WIDE", (32, 96, 256))
