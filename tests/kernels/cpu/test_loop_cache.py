"""Loops are compiled by processes that import no torch, once for a machine and version."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from graftlm.kernels.cpu import loop_cache
from graftlm.kernels.cpu.loop_cache import LoopShapes

SHAPES = LoopShapes(group=3, head_dim=16, bfloat16=False, capped=False)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    monkeypatch.setenv("GRAFTLM_CACHE_DIR", str(tmp_path))
    loop_cache.folder.cache_clear()
    found = loop_cache.folder()
    assert found is not None
    yield found
    loop_cache.folder.cache_clear()


def test_processes_compile_all_parts_and_a_second_start_finds_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop_cache.start(SHAPES)
    assert loop_cache.compiling()
    assert loop_cache.wait_for(lambda: None) is None  # ends when they do
    assert {path.name for path in folder.glob("*.complete")} == {
        "attention-3-16-0-0.complete",
        "layers-3-16-0-0.complete",
    }
    assert len(list(folder.glob("*.nbc"))) == 9
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("compiled again"))
    loop_cache.start(SHAPES)
    assert not loop_cache.compiling()


def test_the_loops_import_no_torch() -> None:
    names = ("decode_attention", "prefill_attention", "matmul", "elementwise", "decode_layer_loops")
    imports = "; ".join(f"import graftlm.kernels.cpu.{name}" for name in names)
    code = f"import sys; {imports}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


def test_waiting_takes_what_appears_and_ends_when_nobody_compiles() -> None:
    assert loop_cache.wait_for(lambda: 7) == 7
    assert loop_cache.wait_for(lambda: None) is None
