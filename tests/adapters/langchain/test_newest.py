"""The LangChain tests again, on the newest langchain-core and langchain.

`make setup` puts these beside the environment's own, into .venv/newest; tests/newest-langchain.txt says why. A process
of its own sees them first and runs everything but the standard suite of random weights.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
NEWEST = Path(sys.prefix) / "newest"


@pytest.mark.skipif(not NEWEST.is_dir(), reason="`make setup` puts the newest langchain-core into .venv/newest")
def test_the_newest_langchain_core_passes_the_same_tests() -> None:
    (installed,) = NEWEST.glob("langchain_core-*.dist-info")
    version = installed.name.removeprefix("langchain_core-").removesuffix(".dist-info")
    files = sorted({*Path(__file__).parent.glob("test_*.py")} - {Path(__file__)})
    program = (
        "import langchain_core, pytest, sys; print(langchain_core.__version__); sys.exit(pytest.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, *map(str, files), "-k", "not Tiny", "-p", "no:cacheprovider"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(NEWEST), str(ROOT)])}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"{version}\n")
    assert "decision models came with" not in done.stdout  # its tests are among those that ran
