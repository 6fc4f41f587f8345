"""Functions over arrays in object code: they take Python's arrays as they are, and free their own."""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from graftlm.kernels.cpu.compiled.array_functions import Kind, call_of, checked, compile_function, kinds_of
from graftlm.kernels.cpu.compiled.loop_runtime import link

SIGNATURE = "Tuple((i4[:,::1], u1[::1], i8))(i4[:,::1], u1[::1], i8, b1)"


def split(table: Any, data: Any, extra: int, doubles: bool) -> Any:
    """Return `table` plus `extra`, `data` or its double, and the sum of the first row."""
    rows, copies = np.empty(table.shape, np.int32), np.zeros(2 * len(data) if doubles else len(data), np.uint8)
    total = 0
    for i in range(table.shape[0]):
        for j in range(table.shape[1]):
            rows[i, j] = table[i, j] + extra
            total += table[i, j] if i == 0 else 0
    for i in range(len(copies)):
        copies[i] = data[i % len(data)]
    return rows, copies, total


@pytest.fixture(scope="module")
def call() -> Callable[..., Any]:
    return call_of(link(compile_function(split, SIGNATURE)), SIGNATURE)


TABLE, DATA = np.array([[1, 2, 3], [4, 5, 6]], np.int32), np.array([7, 8], np.uint8)


def test_a_signature_has_kinds_of_results_and_arguments() -> None:
    assert kinds_of("void(i4[::1], b1)") == ([], [Kind("i4", 1), Kind("b1", 0)])
    assert kinds_of("Tuple((i8[::1], i4[:,::1]))(u1[::1])") == ([Kind("i8", 1), Kind("i4", 2)], [Kind("u1", 1)])


def test_arrays_and_scalars_go_in_and_come_out(call: Callable[..., Any]) -> None:
    rows, copies, total = call(TABLE, DATA, 10, True)
    assert rows.tolist() == [[11, 12, 13], [14, 15, 16]] and rows.dtype == np.int32
    assert copies.tolist() == [7, 8, 7, 8] and total == 6
    assert call(TABLE, DATA, -1, False)[1].tolist() == [7, 8]
    assert call(TABLE[:0], DATA, 1, False)[0].shape == (0, 3)


def test_what_a_call_allocates_is_freed(call: Callable[..., Any]) -> None:
    large = np.ones((1000, 1000), np.int32)
    call(large, DATA, 0, False)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(50):
        call(large, DATA, 0, False)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 40_000  # KB; each call takes 4 MB twice


def test_a_checked_call_refuses_other_types_and_strides(call: Callable[..., Any]) -> None:
    checks = checked(call, SIGNATURE)
    assert checks(TABLE, DATA, 0, False)[2] == 6
    for wrong in (TABLE.astype(np.int64), TABLE[:, ::2], TABLE[0]):
        with pytest.raises(AssertionError):
            checks(wrong, DATA, 0, False)
    with pytest.raises(ctypes.ArgumentError):
        call(TABLE, DATA, 0.5, False)
