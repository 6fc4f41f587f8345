"""Object code of the package is used where the processor has its instructions and the sources are the same."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import pytest

from graftlm.kernels.cpu.compiled import object_code
from graftlm.kernels.cpu.compiled.object_code import TARGETS, MachineCode, is_packaged, packaged, write_archive

NORM, MATMUL = ("norm", (0,)), ("matmul", (1, 0))
V3, V4, VNNI, BF16, AMX, AARCH64 = TARGETS


def code(content: str) -> MachineCode:
    return MachineCode("work", content.encode(), ("free", "malloc"))


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder of archives, and no caches of what was in another one."""
    monkeypatch.setattr(object_code, "FOLDER", tmp_path)
    for name in ("_archives", "_names"):
        monkeypatch.setattr(object_code, name, getattr(object_code, name).__wrapped__)
    for target in TARGETS:
        loops = {"matmul-1-0": code(f"{target.name} matmul")}
        write_archive(tmp_path / f"{target.name}.zip", loops if target.only else loops | {"norm-0": code(target.name)})
    return tmp_path


def machine(monkeypatch: pytest.MonkeyPatch, name: str, features: tuple[str, ...], system: str = "linux") -> None:
    monkeypatch.setattr(platform, "machine", lambda: name)
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(object_code, "processor", lambda: ("a processor", frozenset(features)))


def contents() -> list[str | None]:
    return [found.code.decode() if (found := packaged(one)) is not None else None for one in (NORM, MATMUL)]


@pytest.mark.parametrize(
    ("name", "features", "expected"),
    [
        ("x86_64", V3.features, ["x86-64-v3", "x86-64-v3 matmul"]),
        ("x86_64", (*V4.features, "sse4a"), ["x86-64-v4", "x86-64-v4 matmul"]),
        ("x86_64", BF16.features, ["x86-64-v4", "x86-64-v4-bf16 matmul"]),
        ("x86_64", AMX.features, ["x86-64-v4", "x86-64-v4-amx matmul"]),
        ("x86_64", tuple(x for x in BF16.features if x != "avx512vl"), ["x86-64-v3", "x86-64-v3 matmul"]),
        ("x86_64", V3.features[1:], [None, None]),
        ("x86_64", (), [None, None]),
        ("aarch64", ("neon", "crc"), ["aarch64", "aarch64 matmul"]),
        ("riscv64", V3.features, [None, None]),
    ],
)
def test_a_processor_gets_the_newest_code_that_it_has_all_instructions_for(
    name: str, features: tuple[str, ...], expected: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, name, features)
    assert contents() == expected
    assert [is_packaged(NORM), is_packaged(MATMUL)] == [one is not None for one in expected]


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_other_systems_have_other_object_files(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, "x86_64", BF16.features, system)
    assert contents() == [None, None]


def test_a_loop_that_is_not_packaged_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, "x86_64", V4.features)
    assert packaged(("norm", (1,))) is None and not is_packaged(("norm", (1,)))
    assert packaged(NORM) == MachineCode("work", b"x86-64-v4", ("free", "malloc"))


def test_code_of_other_sources_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, "x86_64", V4.features)
    monkeypatch.setattr(object_code, "sources", lambda *_: "others")
    assert contents() == [None, None]


@pytest.mark.parametrize("left", [0, 100, -40])
def test_a_damaged_archive_counts_as_missing(left: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, "x86_64", V4.features)
    path = folder / "x86-64-v4.zip"
    path.write_bytes(path.read_bytes()[:left])
    assert contents() == ["x86-64-v3", "x86-64-v3 matmul"]


def test_a_damaged_loop_is_taken_from_an_older_kind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, "x86_64", V4.features)
    write_archive(folder / "x86-64-v4.zip", {"norm-0": code("0123456789" * 90)})
    whole = bytearray((folder / "x86-64-v4.zip").read_bytes())
    place = whole.index(b"norm-0.o") + len("norm-0.o") + 5
    whole[place] ^= 0xFF
    (folder / "x86-64-v4.zip").write_bytes(whole)
    assert contents() == ["x86-64-v3", "x86-64-v3 matmul"]


def test_the_same_loops_are_the_same_archive(folder: Path, tmp_path: Path) -> None:
    loops = {"b": code("one"), "a": code("two")}
    for name, given in (("1.zip", loops), ("2.zip", dict(reversed(loops.items())))):
        write_archive(tmp_path / name, given)
    assert (tmp_path / "1.zip").read_bytes() == (tmp_path / "2.zip").read_bytes()


def test_numbas_variables_choose_another_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    read = object_code.processor.__wrapped__
    monkeypatch.setenv("NUMBA_CPU_NAME", "haswell")
    monkeypatch.setenv("NUMBA_CPU_FEATURES", "+avx,+avx2,-avx512f")
    assert read() == ("haswell", {"avx", "avx2"})
    monkeypatch.delenv("NUMBA_CPU_FEATURES")
    assert read()[0] == "haswell"
    monkeypatch.delenv("NUMBA_CPU_NAME")
    assert read()[0] not in ("", "haswell")
