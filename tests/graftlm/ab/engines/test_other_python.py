"""Engines in another environment: a real one, made by venv, which sees this one's packages but not GraftLM."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from graftlm.ab import compare
from graftlm.ab.engines.other_python import checked, command, has, read_pythons
from graftlm.core.errors import ConfigError

PIPELINE = """import sys
def here(model): return sys.prefix
def there(model): return sys.prefix
def run(llm, inputs): return [llm for _ in inputs]
inputs = [1, 2]
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python that has what GraftLM needs, and one package that is missing here."""
    folder = tmp_path_factory.mktemp("other")
    venv.create(folder, symlinks=True)
    found = str(folder / "bin/python")
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(subprocess.run([found, "-c", ask], capture_output=True, text=True, check=True).stdout.strip())
    for name in ("pluggy", "psutil", "rich", "markdown_it", "mdurl", "pygments"):
        (packages / name).symlink_to(Path(sysconfig.get_path("purelib")) / name)
    (packages / "only_there.py").touch()
    return found


def test_each_engine_runs_in_its_own_environment_and_it_is_said(python: str, tmp_path: Path) -> None:
    (tmp_path / "pipeline.py").write_text(PIPELINE)
    names = ["here", "there"]
    comparison = compare(tmp_path / "pipeline.py", names, rounds=1, minutes=0.01, pythons={"there": python})
    prefixes = [result.answers for result in comparison.results]
    assert prefixes == [[sys.prefix], [str(Path(python).parents[1])]]
    assert f"there ran in another environment: {python}." in comparison.notes


def test_what_is_missing_there_is_told_with_its_pip_command(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", symlinks=True)
    (tmp_path / "pipeline.py").write_text(PIPELINE)
    bare = tmp_path / "bare/bin/python"
    with pytest.raises(ConfigError, match=rf"No module named 'rich'; {bare} -m pip install pluggy psutil rich"):
        compare(tmp_path / "pipeline.py", ["there"], pythons={"there": bare})


def test_packages_are_looked_for_where_they_would_run(python: str) -> None:
    assert has(python, ["json", "only_there"]) and not has(python, ["json", "torch"])
    assert not has(sys.executable, ["only_there"])


def test_another_python_is_lent_this_graftlm(python: str) -> None:
    asked = command(python, "-m", "graftlm.machine")
    assert subprocess.run(asked, check=False).returncode == 0
    assert command(sys.executable, "-m", "graftlm.machine") == [sys.executable, "-m", "graftlm.machine"]
    assert command(python, "-m", "http.server") == [python, "-m", "http.server"]


def test_a_python_is_given_by_engine_and_path() -> None:
    given = read_pythons(["vllm=/opt/vllm/bin/python", "openai:http://host/v1?a=b=python3"])
    assert given == {"vllm": "/opt/vllm/bin/python", "openai:http://host/v1?a=b": "python3"}
    for wrong in ("vllm", "=python3", "vllm="):
        with pytest.raises(ConfigError, match=f"--python '{wrong}': write ENGINE=PATH"):
            read_pythons([wrong])


def test_an_unknown_engine_or_what_is_no_program_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--python vllm=python3: the engines are hf, graftlm; name one of them"):
        checked({"vllm": "python3"}, ["hf", "graftlm"])
    with pytest.raises(ConfigError, match=r"hf=.* is no program; give an environment's bin/python"):
        checked({"hf": tmp_path}, ["hf"])
