"""Python processes that this package starts import nothing from the working folder."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from graftlm.kernels.jit import python_process

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("arguments", [("-c", "import random"), ("-m", "random")], ids=["-c", "-m"])
def test_a_file_in_the_working_folder_used_to_run(
    tmp_path: Path, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "random.py").write_text("print('planted')")
    monkeypatch.chdir(tmp_path)
    process = python_process.start(arguments, stdout=subprocess.PIPE, text=True)
    written, _ = process.communicate()
    assert process.returncode == 0 and "planted" not in written


def test_a_process_finds_the_package_of_its_parent() -> None:
    process = python_process.start(("-c", "import graftlm; print(graftlm.__file__)"), stdout=subprocess.PIPE, text=True)
    import graftlm

    assert process.communicate()[0].strip() == graftlm.__file__


def test_no_other_module_starts_a_python() -> None:
    starts = re.compile(r"(?:=|Popen\(|run\(|call\(|check_output\()\s*\[\s*(?:sys\.executable|python\b)")
    files = [
        path
        for folder in ("core", "kernels", "adapters", "plugins", "graftlm", "bench")
        for path in (ROOT / folder).rglob("*.py")
    ]
    found = {path.name for path in files if starts.search(path.read_text(encoding="utf-8"))}
    assert found == {"cost.py", "forwards.py"}  # they run the program of another tree, in its folder


STARTER = """
import subprocess, sys, time
from graftlm.kernels.jit import python_process

code = "from graftlm.kernels.jit.python_process import end_with_starter as watch; watch(); print('up', flush=True)"
started = python_process.start(("-c", code + "; import time; time.sleep(600)"), stdin=subprocess.PIPE)
if sys.argv[1] == "release":
    python_process.release(started)
print(sys.argv[1], flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("way", ["killed", "release"])
def test_a_compilation_used_to_outlive_its_killed_starter(way: str) -> None:
    starter = python_process.start(("-c", STARTER, way), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert starter.stdin is not None and starter.stdout is not None
    with starter, starter.stdin, starter.stdout:
        assert {starter.stdout.readline() for _ in range(2)} == {"up\n", f"{way}\n"}
        (started,) = psutil.Process(starter.pid).children()
        starter.kill()
        limit_s = time.monotonic() + (120 if way == "killed" else 0.5)
        while (
            lives := started.is_running() and started.status() != psutil.STATUS_ZOMBIE
        ) and time.monotonic() < limit_s:
            time.sleep(0.02)
        assert lives == (way == "release")
        if way == "release":
            started.kill()
