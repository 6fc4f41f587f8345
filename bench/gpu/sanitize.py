"""python -m bench.gpu.sanitize: the kernels' tests under NVIDIA's compute-sanitizer.

memcheck finds reads and writes outside of what was allocated (every tensor gets an allocation of its own), racecheck
threads of a block that meet in shared memory without a barrier, synccheck barriers that not all threads reach. Only the
kernels of this library are watched. Several processes share the tests. memcheck runs all of them, but a seventh only of
attention's shapes; the others, which take many times longer, run one case of each test and dtype. Arguments after `--`
go to pytest in place of the kernels' tests, and then all of their cases run. On 16 cores a tool takes about a minute.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import pytest

from bench.harness import ROOT

TOOLS = ("memcheck", "racecheck", "synccheck")
SLOW = ("racecheck", "synccheck")
FOUND = 86  # exit status of the sanitizer after an error
PLACES = ("/usr/local/cuda/bin", "/opt/cuda/bin")
SOME = " or ".join(f"shape{i}-" for i in range(0, 150, 7))
"""Filter that selects every seventh shape of attention's tests, since all combinations take many minutes."""

ROOMS = ("bits12", "gpu", "hopper")
NO_KERNELS = {"test_flashinfer.py", "test_support.py", "test_weight_codec.py"}
"""Tests that launch a library's kernels, or none."""

FILES = [ROOT / "tests/kernels/test_fused_layers.py"]
FILES += sorted(
    path for room in ROOMS for path in (ROOT / "tests/kernels" / room).rglob("test_*.py") if path.name not in NO_KERNELS
)
CHOSEN = f"not engine and (not its_definition or {SOME})"
LEFT_OUT = {
    # without torch's own memory, which graphs need, every tensor has an allocation of its own
    "memcheck": " and not a_graph",
    # A library's product in half precision fails under it, whoever calls it. Of kernels whose warps part ways it
    # reports the word by which Triton sends them, between whose writes and reads all warps meet at a barrier.
    "racecheck": "".join(
        f" and not {name}"
        for name in ("fused_layers", "test_gate_up", "prefetch_matmul", "bits12/test_matmul", "prompt_attention")
    ),
}
WORKERS = 8
SHARE = "SANITIZE_SHARE"  # the environment variable that says which of how many shares of the tests a process takes
FEW = "SANITIZE_FEW"  # set where one case of each test is enough
SUMMARY = re.compile(r"=+ (?:ERROR|RACECHECK) SUMMARY: (\d+) .*")
PASSED = re.compile(r"(\d+) passed")


def find_sanitizer() -> str | None:
    """Return the path of compute-sanitizer; None if it is not installed."""
    home = os.environ.get("CUDA_HOME", "")
    places = [os.environ.get("PATH", ""), os.path.join(home, "bin") if home else "", *PLACES]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(filter(None, places)))


def kernels() -> list[str]:
    """Return the names of all kernels in the source; functions that they call lack the underscore or are inlined."""
    sources = [path.read_text() for room in ROOMS for path in sorted((ROOT / "kernels" / room).rglob("*.py"))]
    decorated = r"@(?:triton|gluon)\.jit(?:\([^()]*\))?.*\n(?:@.*\n)*def (_\w+)"
    return sorted({name for source in sources for name in re.findall(decorated, source)})


@pytest.hookimpl(trylast=True)  # what was asked for is chosen by then
def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Keep this process's share of the tests, where it has one."""
    if FEW in os.environ:
        items[:] = one_of_each(items)
    index, of = map(int, os.environ.get(SHARE, "0/1").split("/"))
    items[:] = items[index::of]


def one_of_each(items: Sequence[Any]) -> list[Any]:
    """Keep the middle case of each test and dtype: the first cases tend to be the simplest."""
    cases: dict[tuple[Any, ...], list[Any]] = {}
    for item in items:
        arguments = item.callspec.params if hasattr(item, "callspec") else {}
        cases.setdefault((item.path, item.originalname, arguments.get("dtype")), []).append(item)
    return [those[len(those) // 2] for those in cases.values()]


def check(
    sanitizer: str, tool: str, tests: Sequence[str], workers: int = 1, *, few: bool = False
) -> tuple[int, list[str]]:
    """Run the tests under one tool, shared among `workers` processes; `few`: one case of each.

    -> exit status, and what the tool has counted or, after an error, what was said.
    """
    options = ["--tool", tool, "--error-exitcode", str(FOUND)]
    options += ["--report-api-errors", "no"] if tool == "memcheck" else []
    for name in kernels():
        options += ["--kernel-name", f"kns={name}"]
    command = [sanitizer, *options, sys.executable, "-P", "-m", "pytest", *tests, "-p", "bench.gpu.sanitize"]
    command += ["-p", "no:cacheprovider"]
    environment = os.environ | ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if tool in ("memcheck", "initcheck") else {})
    environment |= {FEW: "1"} if few else {}
    with ExitStack() as open_files:
        running = []
        for index in range(workers):
            output = open_files.enter_context(tempfile.TemporaryFile("w+"))
            share = environment | {SHARE: f"{index}/{workers}"}
            process = subprocess.Popen(command, cwd=ROOT, env=share, stdout=output, stderr=subprocess.STDOUT, text=True)
            running.append((process, output))
        status, passed, counted = 0, 0, 0
        failed: list[str] = []
        for process, output in running:
            code = process.wait()
            output.seek(0)
            said = output.read().splitlines()
            counts = [int(found[1]) for line in said if (found := SUMMARY.match(line))]
            passed += sum(int(found[1]) for line in said if (found := PASSED.search(line)))
            counted += len(counts)
            if code or not counts or any(counts):
                status, failed = status or code or FOUND, [*failed, *_findings(said[:-120])[:40], *said[-120:]]
    return status, failed or [f"0 found in {counted} processes, {passed} tests passed"]


def _findings(said: Sequence[str]) -> list[str]:
    """Return the lines that the sanitizer printed."""
    return [line for line in said if "=========" in line]


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
    status = 0
    for tool in given.tools:
        tests = given.tests or [*map(str, FILES), "-m", "gpu", "-k", CHOSEN + LEFT_OUT.get(tool, "")]
        code, said = check(sanitizer, tool, tests, given.workers, few=tool in SLOW and not given.tests)
        print(f"{tool}: {'clean' if code == 0 else f'status {code}'}")
        print("\n".join(f"    {line}" for line in said), flush=True)
        status = status or code
    return status


if __name__ == "__main__":
    raise SystemExit(main())
