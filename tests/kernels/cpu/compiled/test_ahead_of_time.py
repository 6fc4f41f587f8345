"""Object code for other processors is made by any machine, and has only the instructions of its kind."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from graftlm.core.config import EngineConfig
from graftlm.core.model.embedded import sprout_folder
from graftlm.core.model.loop_shapes import shapes_of
from graftlm.kernels.cpu.compiled import ahead_of_time, loop_cache, object_code
from graftlm.kernels.cpu.compiled.ahead_of_time import EMBEDDED, SHAPES, native_targets, wanted_loops
from graftlm.kernels.cpu.compiled.object_code import TARGETS, Wanted

NORM: Wanted = ("norm", (0,))
MATMUL: Wanted = ("matmul", (1, 0))
PREFILL: Wanted = ("prefill_attention", (1, 16, 16, 1))
EXPERTS: Wanted = ("experts", (0,))
DOTS: Wanted = ("quantised_panel", (1, 4, 32, 1, 0, 0))
INT8: Wanted = ("quantised_panel", (2, 8, 32, 1, 0, 0))
V3, V4, VNNI, BF16, AMX, AARCH64 = TARGETS
ELF_MACHINE = {"x86_64": 62, "aarch64": 183}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("objects")
    paths = ahead_of_time.make(folder, TARGETS, [NORM, MATMUL, PREFILL, DOTS, INT8])
    assert [path.name for path in paths] == [f"{target.name}.zip" for target in TARGETS]
    return folder


def loops(archive: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(archive) as file:
        return {name: file.read(name) for name in file.namelist() if name.endswith(".o")}


def test_every_kind_has_the_loops_that_differ_from_those_of_the_kind_before(made: Path) -> None:
    names = {target.name: sorted(loops(made / f"{target.name}.zip")) for target in TARGETS}
    dots = ["matmul-1-0.o", "prefill_attention-1-16-16-1.o"]
    every = sorted([*dots, "norm-0.o"])
    codes = {V3.name: every, V4.name: every, AARCH64.name: every}
    codes[VNNI.name] = ["quantised_panel-2-8-32-1-0-0.o"]
    codes[AMX.name] = ["quantised_panel-1-4-32-1-0-0.o"]
    codes[BF16.name] = [*dots, *codes[AMX.name]]
    assert names == codes


def test_object_files_are_those_of_their_machine(made: Path) -> None:
    for target in TARGETS:
        for code in loops(made / f"{target.name}.zip").values():
            assert code[:4] == b"\x7fELF"
            assert int.from_bytes(code[18:20], "little") == ELF_MACHINE[target.machine]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="objdump shows the instructions of its machine")
@pytest.mark.skipif(shutil.which("objdump") is None, reason="objdump is not installed")
def test_loops_that_wait_and_allocate_are_made_for_another_machine(tmp_path: Path) -> None:
    """Inline assembly would end LLVM, which parses that of its own machine alone."""
    others = [target for target in TARGETS if target.machine != platform.machine() and target.only is None]
    for target, path in zip(others, ahead_of_time.make(tmp_path, others, [EXPERTS]), strict=True):
        assert list(loops(path)) == ["experts-0.o"], target.name


@pytest.mark.parametrize("loop", ["matmul-1-0.o", "prefill_attention-1-16-16-1.o", "quantised_panel-1-4-32-1-0-0.o"])
def test_code_has_only_the_instructions_of_its_kind(loop: str, made: Path, tmp_path: Path) -> None:
    found = {}
    for target in (V3, V4, BF16, AMX):
        archive = loops(made / f"{target.name}.zip")
        if loop in archive:
            (tmp_path / loop).write_bytes(archive[loop])
            command = ["objdump", "-d", str(tmp_path / loop)]
            shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found[target.name] = [x in shown for x in ("%ymm", "%zmm", "vdpbf16ps", "tdpbf16ps")]
    ymm, zmm = [True, False, False, False], [True, True, False, False]
    dense = {V3.name: ymm, V4.name: zmm, BF16.name: [True, True, True, False]}
    codes = {BF16.name: [False, True, True, False], AMX.name: [True, True, False, True]}
    assert found == (codes if loop.startswith("quantised") else dense)


RUN = """
import ctypes, sys
from pathlib import Path
import numpy as np
from graftlm.kernels.cpu.compiled import object_code
from graftlm.kernels.cpu.calls import NormCall
from graftlm.kernels.cpu.compiled.loop_runtime import loop_address
object_code.FOLDER = Path(sys.argv[1])
x, weight, out = np.array([3, 4], np.float32), np.ones(2, np.float32), np.zeros(2, np.float32)
call = NormCall(num_rows=1, size=2, x=x.ctypes.data, weight=weight.ctypes.data, out=out.ctypes.data, out_row=2)
ctypes.CFUNCTYPE(None, ctypes.c_void_p)(loop_address("norm", 0))(ctypes.addressof(call))
assert np.allclose(out, x / np.sqrt(12.5)), out
assert not {"numba", "torch"} & set(sys.modules)
print(object_code._archives()[0].stem)
"""


@pytest.mark.parametrize("target", [V3, V4, AARCH64], ids=lambda target: target.name)
def test_a_process_that_has_no_cache_runs_the_code_of_its_processor(target: object_code.Target, made: Path) -> None:
    """An older processor is played by numba's variables."""
    if not target.fits():
        pytest.skip("this machine cannot run it")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "GRAFTLM_CACHE_DIR": "",
        "NUMBA_CPU_NAME": target.cpu,
        "NUMBA_CPU_FEATURES": ",".join(f"+{feature}" for feature in target.features),
    }
    command = [sys.executable, "-c", RUN, str(made)]
    assert (
        subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.strip()
        == target.name
    )


def test_this_machine_is_of_one_complete_kind_or_of_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for machine, features, expected in (
        ("x86_64", V3.features, [V3]),
        ("x86_64", V4.features, [V4]),
        ("x86_64", BF16.features, [V4, BF16]),
        ("x86_64", (), []),
        ("aarch64", ("neon",), [AARCH64]),
    ):
        monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
        monkeypatch.setattr(object_code, "processor", lambda features=features: ("", frozenset(features)))
        assert native_targets() == expected


@pytest.mark.parametrize("options", [{}, {"dtype": "float32"}])
def test_the_loops_of_the_embedded_model_are_among_them(options: dict[str, str]) -> None:
    hf_config = json.loads((sprout_folder() / "config.json").read_text())
    needed = loop_cache.loops_of(shapes_of(hf_config, EngineConfig(**options)))
    assert set(needed) <= set(wanted_loops(EMBEDDED)) <= set(wanted_loops(SHAPES))


def test_each_loop_is_compiled_once() -> None:
    few = wanted_loops([(2, 64), (4, 64)])
    assert len(few) == len(set(few)) == 2 * (2 * 2 + 6)
