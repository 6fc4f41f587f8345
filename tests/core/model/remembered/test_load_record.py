"""A second load repeats no comparison and packs no weight again; nothing else changes an answer."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from graftlm.core.config import EngineConfig
from graftlm.core.fusion import cpu_layers, linears
from graftlm.core.model.load import load_model
from graftlm.core.model.qualify import Reference
from graftlm.core.model.remembered import packed_weights
from graftlm.core.runtime import Runtime
from graftlm.kernels.cpu.linear.packed_codes import PackedCodes
from tests.gguf_files import coded

CPU = EngineConfig(device="cpu", dtype="bfloat16", quiet=True)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("GRAFTLM_CACHE_DIR", str(folder))
    return folder


def answer(path: Path) -> tuple[list[int], str]:
    with Runtime(str(path), device="cpu", dtype="bfloat16", quiet=True) as runtime:
        done = runtime.generate(list(range(40, 60)), max_tokens=12, temperature=0, ignore_eos=True)
    return list(done.token_ids), load_model(path, CPU).execution


@pytest.fixture
def comparisons(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The comparisons and packings that loads make."""
    made: list[str] = []
    for module, name in ((linears, "_multiplies"), (linears, "pack"), (cpu_layers, "_same_in_all_forms")):
        monkeypatch.setattr(module, name, noted(made, name, getattr(module, name)))
    monkeypatch.setattr(Reference, "of", noted(made, "reference", Reference.of))
    return made


def noted(made: list[str], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        made.append(name)
        return function(*args)

    return call


def test_a_second_load_compares_and_packs_nothing_and_answers_as_the_first(
    tmp_path: Path, comparisons: list[str]
) -> None:
    path = coded(tmp_path / "model.gguf")
    first = answer(path)
    assert {"_multiplies", "pack", "_same_in_all_forms", "reference"} <= set(comparisons)
    comparisons.clear()
    assert answer(path) == first and comparisons == []
    assert any(isinstance(module, PackedCodes) for module in load_model(path, CPU).model.modules())


def test_other_weights_options_and_threads_are_compared_again(
    tmp_path: Path, comparisons: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = coded(tmp_path / "model.gguf")
    first = answer(path)[0]
    before = path.stat()
    coded(path, seed=1)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # size and time of before: the content differs
    comparisons.clear()
    assert answer(path)[0] != first and "reference" in comparisons
    for change in ({"activations": "int8"}, {"strict": True}, {"max_model_len": 50}):
        comparisons.clear()
        load_model(path, EngineConfig(device="cpu", dtype="bfloat16", quiet=True, **change))
        assert "reference" in comparisons, change
    comparisons.clear()
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", "AVX2")
    load_model(path, CPU)
    assert "reference" in comparisons


@pytest.mark.parametrize("damage", ["byte", "cut", "empty", "header"])
def test_a_damaged_file_of_packed_weights_is_not_used(
    damage: str, tmp_path: Path, cache: Path, comparisons: list[str]
) -> None:
    path = coded(tmp_path / "model.gguf")
    first = answer(path)
    (file,) = (cache / "packed-weights").iterdir()
    data = bytearray(file.read_bytes())
    if damage == "byte":
        data[-5_000] ^= 1
    elif damage == "header":
        data[60] ^= 1
    data = data[:-4096] if damage == "cut" else data[:0] if damage == "empty" else data
    file.write_bytes(data)
    comparisons.clear()
    assert answer(path) == first and "pack" in comparisons
    assert not file.exists()


def test_a_load_that_refused_something_is_not_remembered(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = coded(tmp_path / "model.gguf")
    monkeypatch.setattr(linears, "_multiplies", lambda *_: False)
    load_model(path, CPU)
    assert not (cache / "self-tests").exists() or not any((cache / "self-tests").iterdir())


def test_a_disk_with_little_space_keeps_no_packed_weights(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, comparisons: list[str]
) -> None:
    monkeypatch.setattr(packed_weights, "_SHARE_OF_FREE", 0.0)
    path = coded(tmp_path / "model.gguf")
    first = answer(path)
    assert not any((cache / "packed-weights").iterdir())
    comparisons.clear()
    assert answer(path) == first and set(comparisons) == {"pack"}
