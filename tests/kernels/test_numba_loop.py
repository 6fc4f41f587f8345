"""Machine code on disk is not used after the source that was inlined into it has changed."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
from numba import carray

from graftlm.kernels import numba_loop


class Call(ctypes.Structure):
    _fields_ = (("value", ctypes.c_int64),)


def run(value: int) -> int:
    def work(pointer):  # type: ignore[no-untyped-def]
        carray(pointer, 1)[0].value += 1

    call = Call(value)
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(numba_loop.compiled(Call, work))(ctypes.addressof(call))
    return int(call.value)


def test_what_is_kept_is_named_after_the_source_of_what_is_inlined(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(__file__).parent / "__pycache__"

    def kept() -> set[Path]:
        return set(folder.glob("test_numba_loop.run.*.nbi"))

    for path in folder.glob("test_numba_loop.run.*.nb?"):
        path.unlink()
    assert run(1) == 2
    first = kept()
    assert run(2) == 3 and kept() == first and len(first) == 1
    monkeypatch.setattr(numba_loop, "_SOURCE", "another")
    assert run(3) == 4
    assert len(kept()) == 2
