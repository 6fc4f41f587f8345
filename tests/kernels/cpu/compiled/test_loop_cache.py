"""Loops are compiled by processes that import no torch, once for a machine and version."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from graftlm.core.config import EngineConfig
from graftlm.core.model.embedded import sprout_path
from graftlm.core.model.loop_shapes import shapes_of
from graftlm.kernels.cpu.compiled import loop_cache, object_code
from graftlm.kernels.cpu.compiled.loop_cache import LoopShapes
from graftlm.kernels.cpu.element_format import ElementFormat

COLD_PAIRS = int(os.environ.get("GRAFTLM_COLD_PAIRS", "1"))
"""How many pairs of processes start with an empty cache; 200 were run once."""

SHAPES = LoopShapes(group=3, head_dim=16, element=ElementFormat.FLOAT32, capped=False)


SPROUT = shapes_of(json.loads(sprout_path().joinpath("config.json").read_text()), EngineConfig())


@contextmanager
def cache_in(path: Path) -> Iterator[Path]:
    """The folder of loops below `path`, while the package has no object code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(object_code, "_archives", lambda *_: ())
        patch.setenv("GRAFTLM_CACHE_DIR", str(path))
        loop_cache.folder.cache_clear()
        found = loop_cache.folder()
        assert found is not None
        try:
            yield found
        finally:
            loop_cache.folder.cache_clear()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with cache_in(tmp_path) as found:
        yield found


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache in which processes have compiled all loops of the embedded model."""
    path = tmp_path_factory.mktemp("compiled")
    with cache_in(path):
        loop_cache.start(SPROUT)
        assert loop_cache.compiling()
        while loop_cache.compiling():
            assert loop_cache.wait_for(lambda: None) is None  # ends when they do
    return path


def test_processes_compile_all_parts_and_a_second_start_finds_them(
    compiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, dim, half = SPROUT.group, SPROUT.head_dim, int(SPROUT.element)
    loops = (
        *(f"decode_attention-{group}-{dim}-{dim}-{half}-0", f"prefill_attention-{group}-{dim}-{dim}-{half}"),
        *(f"matmul-{half}-1", f"matmul-{half}-0"),
        *(f"norm-{half}", f"rotation-{half}", f"gate_mul-{half}", f"decoder_layers-{half}"),
    )
    with cache_in(compiled) as folder:
        assert sorted(path.name for path in folder.iterdir()) == sorted(f"{name}.loop" for name in loops)
        monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("compiled again"))
        loop_cache.start(SPROUT)
        assert not loop_cache.compiling()


def test_a_version_that_is_used_used_to_be_deleted_where_newer_ones_were_compiled(folder: Path) -> None:
    loop = folder / "gate_mul-0.loop"
    loop.touch()
    os.utime(folder, (1000, 1000))
    for number in range(loop_cache._KEPT_VERSIONS):
        (folder.parent / f"another {number}").mkdir()
    loop_cache.folder.cache_clear()
    assert loop_cache.folder() == folder and loop.exists()
    assert len(os.listdir(folder.parent)) == loop_cache._KEPT_VERSIONS


def test_what_the_package_has_is_not_compiled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packaged = {*loop_cache.loops_of(SHAPES)} - {("gate_mul", (0,))}
    monkeypatch.setattr(object_code, "is_packaged", packaged.__contains__)
    loop_cache.start(SHAPES)
    assert loop_cache.wait_for(lambda: None) is None
    assert [path.name for path in folder.iterdir()] == ["gate_mul-0.loop"]


FOREIGN = """
import sys
from pathlib import Path
from graftlm.kernels.cpu.compiled import object_code
object_code.FOLDER = Path(sys.argv[1])
import graftlm as gl
for _ in range(2):
    with gl.Runtime("sprout", device="cpu") as runtime:
        assert runtime.generate("Mara is", max_tokens=2, temperature=0).text
        assert "decode steps in one call" in runtime.stats().execution
"""


def test_a_package_of_another_platform_runs_with_one_line_that_says_so(compiled: Path, tmp_path: Path) -> None:
    if object_code.TARGETS[-1].fits():
        pytest.skip("this is the other platform")
    object_code.write_archive(tmp_path / "objects/aarch64.zip", {})
    shutil.copytree(compiled, tmp_path / "cache")
    missing = [*tmp_path.glob("cache/cpu-loops/*/norm-*"), *tmp_path.glob("cache/cpu-loops/*/gate_mul-*")]
    for path in missing:
        path.unlink()
    lines = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", FOREIGN, str(tmp_path / "objects")],
            env={**os.environ, "GRAFTLM_CACHE_DIR": str(tmp_path / "cache")},
            cwd=Path(__file__).parents[4],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        lines.append(done.stderr.splitlines())
    assert len(missing) == 2 and all(path.exists() for path in missing)  # its first process has compiled them
    (line,), later = lines
    assert "the package has it for aarch64; it is compiled now" in line
    assert later == []


def test_a_package_without_object_code_is_told_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(object_code, "FOLDER", tmp_path)
    object_code._archives.cache_clear()
    try:
        assert object_code.why_none() == "the package has none"
    finally:
        object_code._archives.cache_clear()


def test_loops_are_dealt_in_parts_of_about_the_same_work() -> None:
    loops = loop_cache.loops_of(SHAPES)
    for num_parts in (1, 2, 3, 4):
        parts = loop_cache._dealt(loops, num_parts)
        assert len(parts) == num_parts and sorted(sum(parts, [])) == sorted(loops)
        work = [sum(map(loop_cache._cost, part)) for part in parts]
        assert max(work) - min(work) <= 5
    assert loop_cache._dealt(loops[:1], 4) == [loops[:1]]


def test_the_cache_is_kept_apart_for_the_processor_that_numba_is_told_of(tmp_path: Path) -> None:
    code = "from graftlm.kernels.cpu.compiled import loop_cache; print(loop_cache.folder().name)"
    told = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma"}
    names = set()
    for more in ({}, told, told | {"NUMBA_CPU_FEATURES": "+avx"}):
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "GRAFTLM_CACHE_DIR": str(tmp_path)} | more
        names.add(subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True).stdout)
    assert len(names) == 3


def test_a_process_that_ends_while_others_compile_for_it_warns_of_nothing() -> None:
    code = """
import os, subprocess, sys
from graftlm.kernels.cpu.compiled import loop_cache
end, _ = os.pipe()  # closed with this process, so the other one ends too
waits = [sys.executable, "-c", "import sys; sys.stdin.read()"]
loop_cache._processes.append(subprocess.Popen(waits, stdin=end))
"""
    done = subprocess.run([sys.executable, "-W", "default", "-c", code], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_loops_import_no_torch() -> None:
    names = ("decode_attention", "prefill_attention", "matmul", "elementwise", "decoder_layers")
    imports = "; ".join(f"import graftlm.kernels.cpu.loops.{name}" for name in names)
    code = f"import sys; {imports}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


def test_waiting_takes_what_appears_and_ends_when_nobody_compiles() -> None:
    assert loop_cache.wait_for(lambda: 7) == 7
    assert loop_cache.wait_for(lambda: None) is None


COLD_PAIR = """
import os, sys, tempfile
import numba, torch
from graftlm.kernels.cpu.attention import decode as decode_attention
from graftlm.kernels.cpu.compiled import loop_cache
from tests.kernels.cpu.attention.test_decode import DIM, NUM_KEYS, NUM_ROWS, attend, keys_and_values

def expected():
    k, v, q = keys_and_values()
    k, v = (x.view(NUM_ROWS, NUM_KEYS, 2, DIM).transpose(1, 2) for x in (k, v))
    q = q.view(NUM_ROWS, 2, 2, DIM)
    return (torch.softmax(q @ k.transpose(2, 3) * DIM**-0.5, -1) @ v).view(NUM_ROWS, 4, DIM)

def start(folder):
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.environ["GRAFTLM_CACHE_DIR"] = folder
        loop_cache.folder.cache_clear()
        torch.set_num_threads(2)
        decode_attention._SMALL_BYTES = 0
        status = 0 if torch.allclose(attend(), expected(), atol=1e-5) else 2
    finally:
        os._exit(status)

for number in range(int(sys.argv[1])):
    with tempfile.TemporaryDirectory() as folder:
        pair = [start(folder), start(folder)]  # both compile; then one loads what they have left
        statuses = [os.waitpid(pid, 0)[1] for pid in pair] + [os.waitpid(start(folder), 0)[1]]
    print(number, *map(os.waitstatus_to_exitcode, statuses), flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork")
def test_pairs_of_processes_with_a_cold_cache_compile_and_run_a_loop_and_a_third_loads_it() -> None:
    command = [sys.executable, "-c", COLD_PAIR, str(COLD_PAIRS)]
    done = subprocess.run(command, cwd=Path(__file__).parents[4], capture_output=True, text=True)
    assert done.stdout.splitlines() == [f"{number} 0 0 0" for number in range(COLD_PAIRS)], done.stderr
