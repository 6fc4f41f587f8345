"""What a user installs: the wheel that is built from the source distribution."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from graftlm.kernels.cpu.compiled.ahead_of_time import EMBEDDED, native_targets, wanted_loops

ROOT = Path(__file__).parents[1]
OBJECTS = "graftlm/kernels/cpu/objects/"


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel built from it, by the build backend in this environment."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> zipfile.ZipFile:
    (path,) = dist.glob("*.whl")
    return zipfile.ZipFile(path)


def source_files() -> set[str]:
    """Every tracked file that belongs into the wheel, by its path there."""
    folders = {"graftlm": "graftlm"} | {f: f"graftlm/{f}" for f in ("core", "adapters", "kernels", "plugins")}
    return {
        f"{inside}/{path.relative_to(ROOT / folder)}"
        for folder, inside in folders.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.parent.name != "objects"
    }


def test_the_wheel_holds_each_source_file_once(wheel: zipfile.ZipFile) -> None:
    packed = [name for name in wheel.namelist() if ".dist-info/" not in name and not name.startswith(OBJECTS)]
    assert sorted(packed) == sorted(source_files())
    assert "graftlm/core/kv/radix.py" in packed
    assert "graftlm/py.typed" in packed


def test_the_sdist_holds_the_folders_and_no_copy_behind_a_link(dist: Path) -> None:
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"core/kv/radix.py", "graftlm/__init__.py", "pyproject.toml", "README.md", "LICENSE"} <= names
    assert not [name for name in names if name.startswith(("graftlm/core", "tests", "bench", "kernels/cpu/objects"))]


def test_the_wheel_has_object_code_for_processors_like_this_one_and_says_so(wheel: zipfile.ZipFile) -> None:
    objects = [name for name in wheel.namelist() if name.startswith(OBJECTS)]
    holds = f"linux_{platform.machine()}" if objects else "any"
    assert wheel.filename is not None and wheel.filename.endswith(f"-py3-none-{holds}.whl")
    whole = [target.name for target in native_targets() if target.only is None]
    loops = wanted_loops(EMBEDDED)
    plain = [target.name for target in native_targets() if any(map(target.has, loops))]  # none is quantised
    names = plain + [f"{name}-grammar" for name in whole]
    assert sorted(objects) == sorted(f"{OBJECTS}{name}.zip" for name in names)


FIRST_TOKEN = """
import graftlm
from graftlm.kernels.cpu.compiled import loop_cache
runtime = graftlm.Runtime("sprout", quiet=True)
print(runtime.generate("Mara is a baker. Mara works as a", max_tokens=4, temperature=0).text)
print(runtime.generate("Mara is", json_schema={"type": "object"}, max_tokens=9).text)
from graftlm.core.grammar.automata import jit
assert jit._thread is None and all(loop.machine_code is not None for loop in jit._loops)
assert not loop_cache._processes
"""


@pytest.mark.skipif(not native_targets(), reason="there is no object code for this machine")
def test_the_installed_wheel_compiles_no_loop_for_the_embedded_model(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path / "site")
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site"), "GRAFTLM_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-P", "-c", FIRST_TOKEN]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "baker" in done.stdout, done.stderr
    assert list(tmp_path.glob("cache/*-loops/*/*.loop")) == []


def test_the_wheel_says_its_licence_and_command(wheel: zipfile.ZipFile) -> None:
    (info,) = {name.partition("/")[0] for name in wheel.namelist() if ".dist-info/" in name}
    assert "Apache License" in wheel.read(f"{info}/licenses/LICENSE").decode()
    assert "License-Expression: Apache-2.0" in wheel.read(f"{info}/METADATA").decode()
    entry_points = wheel.read(f"{info}/entry_points.txt").decode()
    assert "graftlm = graftlm.cli:main" in entry_points
    assert "[pytest11]\ngraftlm = graftlm.pytest_plugin" in entry_points


def test_the_installed_wheel_works_away_from_the_repository(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path / "site")
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}

    def python(*arguments: str) -> str:
        command = [sys.executable, "-P", *arguments]
        return subprocess.check_output(command, cwd=tmp_path, env=environment, text=True)

    code = "import graftlm, graftlm.core.kv.radix; print(graftlm.__file__, graftlm.Usage(1, 2, 3).total_tokens)"
    assert python("-c", code).split() == [str(tmp_path / "site/graftlm/__init__.py"), "4"]
    assert json.loads(python("-m", "graftlm", "plugins", "--json"))[0]["plugin"] == "graftlm"
