"""python -m bench.gpu.sanitize: the kernels' tests under NVIDIA's compute-sanitizer.

memcheck finds reads and writes outside of what was allocated (every tensor gets an allocation of its own), racecheck
threads of a block that meet in shared memory without a barrier. Only the kernels of this library are watched. Several
processes share the tests where pytest-xdist is installed. Arguments after `--` go to pytest in place of the tests.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.harness import ROOT

TOOLS = ("memcheck", "racecheck")
FOUND = 86  # the exit status that the sanitizer gives for an error it has seen
PLACES = ("/usr/local/cuda/bin", "/opt/cuda/bin")
FILES = ("triton_attention", "triton_elementwise", "triton_greedy", "fp8", "device_step")
SOME = " or ".join(f"shape{i}-" for i in range(0, 150, 7))
"""Of the shapes, dtypes and variants of attention: each of them, but not all together, which takes many minutes."""

TESTS = (*(f"tests/kernels/test_{name}.py" for name in FILES), "-m", "gpu")
TESTS += ("-k", f"not engine and (not its_definition or {SOME})")
WORKERS = 8
SUMMARY = re.compile(r"=+ (?:ERROR|RACECHECK) SUMMARY: (\d+) .*")  # one of each process


def find_sanitizer() -> str | None:
    """Where compute-sanitizer is; None if this machine has none."""
    home = os.environ.get("CUDA_HOME", "")
    places = [os.environ.get("PATH", ""), os.path.join(home, "bin") if home else "", *PLACES]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(filter(None, places)))


def kernels() -> list[str]:
    """The names of all kernels, as their source has them; what they call has no underscore in front, or is inlined."""
    sources = [path.read_text() for path in sorted((ROOT / "kernels").glob("triton_*.py"))]
    return sorted({name for source in sources for name in re.findall(r"@triton\.jit.*\n(?:@.*\n)*def (_\w+)", source)})


def check(sanitizer: str, tool: str, tests: Sequence[str]) -> tuple[int, list[str]]:
    """Run the tests under one tool. -> exit status, and what the tool has counted or, after an error, all it said."""
    options = ["--tool", tool, "--error-exitcode", str(FOUND), "--target-processes", "all"]
    options += ["--report-api-errors", "no"] if tool == "memcheck" else []
    for name in kernels():
        options += ["--kernel-regex", f"kns={name}"]
    environment = os.environ | ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if tool in ("memcheck", "initcheck") else {})
    with tempfile.TemporaryDirectory() as folder:  # what processes of pytest-xdist print would be lost
        command = [sanitizer, *options, "--log-file", f"{folder}/%p.log", sys.executable, "-m", "pytest", *tests]
        done = subprocess.run(
            [*command, "-p", "no:cacheprovider"], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        said = [line for path in sorted(Path(folder).iterdir()) for line in path.read_text().splitlines()]
    tested = (done.stdout + done.stderr).splitlines()
    counted = [int(found[1]) for line in said if (found := SUMMARY.match(line))]
    if done.returncode or not counted or any(counted):
        return done.returncode or FOUND, [*said[:60], *tested[-60:]]
    return 0, [f"{sum(counted)} found in {len(counted)} processes", *tested[-1:]]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.sanitize", description=__doc__)
    parser.add_argument(
        "--tools", nargs="+", default=TOOLS, choices=("memcheck", "racecheck", "synccheck", "initcheck")
    )
    parser.add_argument(
        "--workers", type=int, default=WORKERS, help=f"processes, with pytest-xdist (default {WORKERS})"
    )
    parser.add_argument("tests", nargs="*", help="arguments for pytest in place of the kernels' tests")
    given = parser.parse_args(arguments)
    sanitizer = find_sanitizer()
    if sanitizer is None:
        print("compute-sanitizer was not found; it comes with the CUDA toolkit: set CUDA_HOME or PATH", file=sys.stderr)
        return 2
    shared = importlib.util.find_spec("xdist") is not None
    whole = (*TESTS, "-n", str(given.workers)) if shared else TESTS
    status = 0
    for tool in given.tools:
        code, said = check(sanitizer, tool, given.tests or whole)
        print(f"{tool}: {'clean' if code == 0 else f'status {code}'}")
        print("\n".join(f"    {line}" for line in said), flush=True)
        status = status or code
    return status


if __name__ == "__main__":
    raise SystemExit(main())
