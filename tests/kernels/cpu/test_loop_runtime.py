"""Machine code on disk is not used after the source that was inlined into it has changed."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
from numba import carray, config

from graftlm.kernels.cpu import loop_runtime


class Call(ctypes.Structure):
    _fields_ = (("value", ctypes.c_int64),)


def run(value: int, step: int = 1) -> int:
    def work(pointer):  # type: ignore[no-untyped-def]
        carray(pointer, 1)[0].value += step

    call = Call(value)
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(loop_runtime.compile_loop(Call, work))(ctypes.addressof(call))
    return int(call.value)


def test_what_is_kept_is_named_after_the_source_of_what_is_inlined(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))

    def kept() -> set[Path]:
        return set(tmp_path.rglob("test_loop_runtime.run.*.nbi"))

    assert run(1) == 2
    first = kept()
    assert run(2) == 3 and kept() == first and len(first) == 1
    monkeypatch.setattr(loop_runtime, "_SOURCE", "another")
    assert run(3) == 4
    assert len(kept()) == 2


def test_forms_that_are_compiled_at_the_same_time_are_kept_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))

    def kept() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in tmp_path.rglob("test_loop_runtime.run.*.nb?")}

    assert run(1) == 2
    first = kept()
    # as in a process that began before the first was done, and so knows nothing of it
    monkeypatch.setattr("numba.core.caching.IndexDataCacheFile._load_index", lambda _: {})
    assert run(1, step=10) == 11
    assert {path: kept()[path] for path in first} == first and len(kept()) == 2 * len(first) == 4
