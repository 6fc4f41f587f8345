"""Engines whose packages live in another environment: its Python runs this GraftLM with its own packages."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import graftlm
from graftlm.core.errors import ConfigError
from graftlm.kernels.jit import python_process

PYTHON = "GRAFTLM_AB_PYTHON"
"""The environment variable that gives an engine's process the Python of the comparison."""
NEEDS = "pluggy psutil rich"
"""Packages that an engine's process needs beside the engine's own."""
_RUN = """\
import importlib.util, runpy, sys
spec = importlib.util.spec_from_file_location("graftlm", sys.argv[1])
sys.modules["graftlm"] = package = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
sys.argv[:3] = sys.argv[2:3]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
_HAS = "import importlib.util as i, sys; sys.exit(not all(i.find_spec(name) for name in sys.argv[1:]))"


def command(python: str, *arguments: str) -> list[str]:
    """Return the command `python ARGUMENTS`. In another Python, `-m graftlm...` runs this GraftLM, not its own."""
    if python == sys.executable or arguments[0] != "-m" or not arguments[1].startswith("graftlm."):
        return [python, *arguments]
    return [python, "-c", _RUN, str(Path(graftlm.__file__).resolve()), *arguments[1:]]


def has(python: str, packages: Sequence[str]) -> bool:
    """Return True if a Python finds all these packages, without importing them."""
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return python_process.start(("-c", _HAS, *packages), python=python, **quiet).wait() == 0


def home_of(packages: Sequence[str]) -> str | None:
    """Return the Python that has these packages: this process's, else that of the comparison; None if neither has."""
    pythons = dict.fromkeys([sys.executable, os.environ.get(PYTHON, sys.executable)])
    return next((python for python in pythons if has(python, packages)), None)


def checked(pythons: Mapping[str, str | Path], engines: Sequence[str]) -> dict[str, str]:
    """Return each named engine's Python as a path. Raises: ConfigError for an unknown engine, or a missing program."""
    found: dict[str, str] = {}
    for engine, python in pythons.items():
        if engine not in engines:
            raise ConfigError(f"--python {engine}={python}: the engines are {', '.join(engines)}; name one of them")
        path = shutil.which(Path(python).expanduser())
        if path is None:
            raise ConfigError(f"--python {engine}={python} is no program; give an environment's bin/python")
        found[engine] = str(Path(path).absolute())  # not resolved: a link's location tells Python its environment
    return found


def read_pythons(given: Sequence[str]) -> dict[str, str]:
    """Parse `ENGINE=PATH` of the command line. An engine's own name may hold "=", as a URL does."""
    found = {}
    for one in given:
        engine, _, path = one.rpartition("=")
        if not engine or not path:
            raise ConfigError(f"--python {one!r}: write ENGINE=PATH, such as hf-batching=/opt/client/bin/python")
        found[engine] = path
    return found
