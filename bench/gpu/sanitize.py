"""python -m bench.gpu.sanitize: the kernels' tests under NVIDIA's compute-sanitizer.

memcheck finds reads and writes outside of what was allocated, racecheck threads of a block that meet in shared memory
without a barrier. Every tensor gets an allocation of its own, so that a step over its end is seen. Arguments after `--`
go to pytest.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence

from bench.harness import ROOT

TOOLS = ("memcheck", "racecheck")
FOUND = 86  # the exit status that the sanitizer gives for an error it has seen
PLACES = ("/usr/local/cuda/bin", "/opt/cuda/bin")
TESTS = ("tests/kernels", "-m", "gpu", "-k", "not engine and not layers and not model", "-p", "no:cacheprovider")
SUMMARY = re.compile(r"=+ (?:ERROR|RACECHECK) SUMMARY: .*")


def find_sanitizer() -> str | None:
    """Where compute-sanitizer is; None if this machine has none."""
    home = os.environ.get("CUDA_HOME", "")
    places = [os.environ.get("PATH", ""), os.path.join(home, "bin") if home else "", *PLACES]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(filter(None, places)))


def check(sanitizer: str, tool: str, tests: Sequence[str]) -> tuple[int, list[str]]:
    """Run the tests under one tool. -> exit status, and what the tool has counted or, after an error, all it said."""
    options = ["--tool", tool, "--error-exitcode", str(FOUND), "--target-processes", "all", "--report-api-errors", "no"]
    command = [sanitizer, *options, sys.executable, "-m", "pytest", *tests]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    said = (done.stdout + done.stderr).splitlines()
    if done.returncode:
        return done.returncode, said[-60:]
    return 0, [line for line in said if SUMMARY.match(line) or " passed" in line]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.sanitize", description=__doc__)
    parser.add_argument(
        "--tools", nargs="+", default=TOOLS, choices=("memcheck", "racecheck", "synccheck", "initcheck")
    )
    parser.add_argument("tests", nargs="*", help="arguments for pytest in place of the kernels' tests")
    given = parser.parse_args(arguments)
    sanitizer = find_sanitizer()
    if sanitizer is None:
        print("compute-sanitizer was not found; it comes with the CUDA toolkit: set CUDA_HOME or PATH", file=sys.stderr)
        return 2
    status = 0
    for tool in given.tools:
        code, said = check(sanitizer, tool, given.tests or TESTS)
        print(f"{tool}: {'clean' if code == 0 else f'status {code}'}")
        print("\n".join(f"    {line}" for line in said), flush=True)
        status = status or code
    return status


if __name__ == "__main__":
    raise SystemExit(main())
