"""Build hook: the wheel gets object code of the loops of CPU kernels and grammars, so that no machine compiles it.

GRAFTLM_OBJECT_CODE  native (the default): for processors like the one that builds and the embedded model; all: for a
                     wheel to publish, see kernels/cpu/compiled/ahead_of_time.py; none
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

VARIABLE = "GRAFTLM_OBJECT_CODE"
OBJECTS = "kernels/cpu/objects"


class ObjectCode(BuildHookInterface[Any]):
    """Compiles with numba, in a process that sees nothing of the package but the loops."""

    def dependencies(self) -> list[str]:
        return ["numba>=0.60"] if self._kinds() != "none" else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable" or self._kinds() == "none":
            return
        self._temporary = tempfile.TemporaryDirectory()
        folder = Path(self._temporary.name)
        for part in ("kernels/cpu", "core/grammar"):
            shutil.copytree(Path(self.root, part), folder / "graftlm" / part)
        for part in (
            "kernels/disk_cache.py",
            "kernels/jit/python_process.py",
            "core/errors.py",
            "core/interpreter_exit.py",
        ):
            (folder / "graftlm" / part).parent.mkdir(exist_ok=True)
            shutil.copy(Path(self.root, part), folder / "graftlm" / part)
        (folder / "graftlm/__init__.py").touch()
        made = folder / "objects"
        command = [
            sys.executable,
            "-m",
            "graftlm.kernels.cpu.compiled.ahead_of_time",
            self._kinds(),
            "--folder",
            str(made),
            "--package",
            "graftlm.core.grammar.automata.jit",
        ]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}
        done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL)
        if done.returncode and self._kinds() == "native":  # the package compiles what it needs
            self.app.display_warning("GraftLM: the wheel has no object code of the loops, which did not compile")
            return
        done.check_returncode()
        for path in sorted(made.glob("*.zip")):
            build_data["force_include"][str(path)] = f"graftlm/{OBJECTS}/{path.name}"
            build_data["tag"], build_data["pure_python"] = f"py3-none-{self._platforms()}", False

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "_temporary"):
            self._temporary.cleanup()

    def _platforms(self) -> str:
        """Return the platforms whose object code the wheel holds, as in a wheel's tag."""
        if self._kinds() == "native":
            return f"linux_{platform.machine()}"
        return "manylinux_2_28_x86_64.manylinux_2_28_aarch64"  # glibc's version is torch's: the loops call none of it

    def _kinds(self) -> str:
        if sys.platform != "linux":  # whose object files the archives hold
            return "none"
        found = os.environ.get(VARIABLE, "native")
        if found not in ("all", "native", "none"):
            raise ValueError(f"{VARIABLE} is {found!r}; it must be all, native or none")
        return found
