"""The thin packages under which users of a framework look for GraftLM: built, and imported from what was built."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CASES = {
    "langchain-graftlm": ("from langchain_graftlm import ChatGraftLM, GraftLLM", "langchain_graftlm/__init__.py"),
    "llama-index-llms-graftlm": (
        "from llama_index.llms.graftlm import GraftLLM, GraftSelector; import llama_index.core; "
        "from importlib.util import find_spec; assert find_spec('llama_index.llms.huggingface')",
        "llama_index/llms/graftlm/__init__.py",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_built_wheel_imports_and_holds_nothing_but_its_folder(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT / "packages" / name, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    statement, initial = CASES[name]
    folder = initial.rpartition("/")[0]
    with zipfile.ZipFile(wheel) as archive:
        members = [member for member in archive.namelist() if ".dist-info/" not in member]
        archive.extractall(tmp_path / "site")
    assert sorted(members) == sorted([initial, f"{folder}/py.typed"])
    site = tmp_path / "site"
    # what pip would put into site-packages is put before it; llama_index is a namespace, so both parts are seen
    code = f"import sys; sys.path.insert(0, {str(site)!r}); {statement}; print('imported')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONWARNINGS": ""}, capture_output=True, text=True
    )
    assert (done.stdout, done.returncode) == ("imported\n", 0), done.stderr
