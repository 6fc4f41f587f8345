"""Machine code on disk is used again only if it is whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from graftlm.kernels.cpu.compiled import loop_cache, loop_runtime, object_code
from graftlm.kernels.cpu.compiled.object_code import MachineCode

NORM = ("norm", 0)
NORM_LOOP = ("norm", (0,))


@pytest.fixture(autouse=True)
def nothing_is_packaged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_code, "_archives", lambda *_: ())


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(loop_cache, "folder", lambda *_: tmp_path)
    return tmp_path


def address() -> int:
    return loop_runtime.loop_address.__wrapped__(*NORM)  # type: ignore[attr-defined,no-any-return]


def compiles(*_: object) -> MachineCode:
    raise AssertionError("compiled again")


def test_a_loop_is_compiled_once_and_then_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert address()
    assert [path.name for path in folder.iterdir()] == ["norm-0.loop"]
    monkeypatch.setattr(loop_cache, "compile_one", compiles)
    assert address()


def test_damaged_machine_code_is_compiled_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert address()
    whole = (folder / "norm-0.loop").read_bytes()
    (folder / "norm-0.loop").write_bytes(whole[:-1] + b"!")
    assert address() and len((folder / "norm-0.loop").read_bytes()) == len(whole)
    monkeypatch.setattr(loop_cache, "compile_one", compiles)
    assert address()


def test_what_the_package_has_is_neither_compiled_nor_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = loop_cache.compile_one("norm", (0,))
    (folder / "norm-0.loop").unlink()
    monkeypatch.setattr(object_code, "packaged", {NORM_LOOP: found}.get)
    monkeypatch.setattr(loop_cache, "compile_one", compiles)
    assert address()
    assert list(folder.iterdir()) == []


def test_without_a_cache_folder_a_loop_is_compiled_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_cache, "folder", lambda *_: None)
    assert address()
