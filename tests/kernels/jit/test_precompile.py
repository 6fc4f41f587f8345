"""Compiling ahead is for GPUs; tests/gpu/test_compile.py has the rest."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest
import torch

from graftlm.kernels.jit.precompile import Compiling, compile_together


def test_nothing_is_run_where_triton_does_not_run() -> None:
    assert compile_together(lambda: pytest.fail("a dry call without a GPU"), torch.device("cpu")) == 0


class Kernel:
    """Compiles as Triton does where warnings are concerned: first enters first, leaves first."""

    def __init__(self) -> None:
        self.entered, self.both, self.left = threading.Event(), threading.Event(), threading.Event()

    def preload(self, specialization: str) -> Any:
        if specialization == "first":
            with warnings.catch_warnings():
                self.entered.set()
                warnings.simplefilter("ignore", DeprecationWarning)
                assert self.both.wait(120)
            self.left.set()
        else:
            assert self.entered.wait(120)
            with warnings.catch_warnings():
                self.both.set()
                assert self.left.wait(120)
                warnings.simplefilter("ignore", PendingDeprecationWarning)
        self.run = True
        return self


def test_threads_that_compile_leave_warnings_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    kernel, before, content = Kernel(), warnings.filters, list(warnings.filters)
    compiling = Compiling([(kernel, "first"), (kernel, "second")], torch.device("cuda", 0))
    assert kernel.left.wait(120)
    assert compiling.wait() == 2
    assert warnings.filters is before and list(before) == content
