"""Compiling ahead is for GPUs; tests/gpu/test_compile.py has the rest."""

from __future__ import annotations

import pytest
import torch

from graftlm.kernels.triton_compile import compile_together


def test_nothing_is_run_where_triton_does_not_run() -> None:
    assert compile_together(lambda: pytest.fail("a dry call without a GPU"), torch.device("cpu")) == 0
