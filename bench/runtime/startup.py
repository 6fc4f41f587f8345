"""Time of `import graftlm`, and of building a runtime before any weights are loaded."""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Sequence

from bench.harness import Options, Row
from graftlm.kernels.jit import python_process

TIMED = """
import sys, time
started = time.perf_counter()
import graftlm
print(time.perf_counter() - started, "torch" in sys.modules)
started = time.perf_counter()
graftlm.Runtime("sprout")
print(time.perf_counter() - started)
started = time.perf_counter()
graftlm.Runtime("sprout")
print(time.perf_counter() - started)
"""


def _timed() -> list[str]:
    done = python_process.run(["-c", TIMED], text=True, check=True, stdout=subprocess.PIPE)
    return str(done.stdout).split()


def run(options: Options) -> Sequence[Row]:
    runs = [_timed() for _ in range(options.choose(3, 7))]
    imports, first, later = (statistics.median(float(run[i]) for run in runs) for i in (0, 2, 3))
    touched = sum(run[1] == "True" for run in runs)
    return [
        Row("startup", "import graftlm", imports, "s", floor=0.5, at_most=True),
        Row("startup", "of these imports, those that loaded torch", touched, "imports", floor=0, at_most=True),
        Row("startup", "Runtime() the first time, with its imports", 1000 * first, "ms"),
        Row("startup", "Runtime() after that", 1000 * later, "ms", floor=5, at_most=True),
    ]
