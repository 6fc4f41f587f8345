"""Compiled loops: kept on disk where that can be, and plain Python without a compiler."""

from __future__ import annotations

import numba
import pytest
from numba.core import caching

from graftlm.core.grammar import jit


def doubled(x: int) -> int:
    return 2 * x


def test_a_function_is_compiled() -> None:
    assert jit.jit(doubled)(21) == 42


def test_without_a_folder_for_compiled_code_it_is_compiled_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching.CompileResultCacheImpl, "_locator_classes", [])
    with pytest.raises(RuntimeError, match="cannot cache"):
        numba.njit(cache=True)(doubled)
    assert jit.jit(doubled)(21) == 42


def test_without_numba_the_function_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "COMPILED", False)
    assert jit.jit(doubled) is doubled
