"""Machine code on disk is used again only where it is what would be compiled, and only if it is whole."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
from numba import carray

from graftlm.kernels.cpu import loop_cache, loop_runtime


class Call(ctypes.Structure):
    _fields_ = (("value", ctypes.c_int64),)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(loop_cache, "folder", lambda: tmp_path)
    return tmp_path


def run(value: int, step: int = 1) -> int:
    def work(pointer):  # type: ignore[no-untyped-def]
        carray(pointer, 1)[0].value += step

    call = Call(value)
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(loop_runtime.compile_loop(Call, work))(ctypes.addressof(call))
    return int(call.value)


def kept(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.glob("test_loop_runtime.run.*.nb?")}


def test_a_loop_is_compiled_once_and_then_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(1) == 2
    first = kept(folder)
    assert len(first) == 2  # numba's index and the machine code

    def compiles(self: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr("numba.core.ccallback.CFunc._compile_uncached", compiles)
    assert run(2) == 3 and kept(folder) == first


def test_variants_that_are_compiled_at_the_same_time_are_kept_apart(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(1) == 2
    first = kept(folder)
    # as in a process that began before the first was done, and so knows nothing of it
    monkeypatch.setattr("numba.core.caching.IndexDataCacheFile._load_index", lambda _: {})
    assert run(1, step=10) == 11
    assert {path: kept(folder)[path] for path in first} == first and len(kept(folder)) == 2 * len(first) == 4


def test_damaged_machine_code_is_compiled_anew(folder: Path) -> None:
    assert run(1) == 2
    for path in kept(folder):
        path.write_bytes(b"\x80damaged")
    assert run(1) == 2
    assert run(1) == 2 and all(data != b"\x80damaged" for data in kept(folder).values())


def test_without_a_cache_folder_a_loop_is_compiled_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_cache, "folder", lambda: None)
    assert run(3) == 4
