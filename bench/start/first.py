"""From process start to the first token and the first JSON: on a fresh machine and in a later process.

Each round is a process of its own. A fresh machine has an empty cache folder. The baseline of every figure is a process
that imports torch and transformers and does nothing else, run beside it.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.harness import ROOT, Options, Row
from graftlm.kernels.jit import python_process

IMPORTS = "import torch, transformers"
SCRIPT = """
import sys, time
import graftlm as gl
runtime = gl.Runtime(sys.argv[1], quiet=True)
runtime.generate("Mara is", max_tokens=1, temperature=0)
print(time.time())
schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}}}
runtime.generate("Mara is", json_schema=schema, max_tokens=40, temperature=0)
print(time.time())
runtime.close()
"""
LABELS = {
    "token": "first token",
    "script": "whole script: a token and a JSON object",
    "script CPU": "CPU time of the whole script",
}
FLOORS = {"fresh machine": {"token": 4.0, "script": 8.0}, "later process": {"token": 2.5, "script": 3.0}}
"""Seconds, on two idle cores."""


def run(options: Options) -> Sequence[Row]:
    rows: list[Row] = []
    model = options.model or "sprout"
    found: dict[str, list[dict[str, float]]] = {name: [] for name in FLOORS}
    for _ in range(1 if options.quick else options.repeats):
        with tempfile.TemporaryDirectory() as folder:
            for name in FLOORS:
                found[name].append(_measure(model, Path(folder)))
    for name, floors in FLOORS.items():
        for what, label in LABELS.items():
            samples = sorted(sample[what] for sample in found[name])
            imports = "imports CPU" if what == "script CPU" else "imports"
            baseline = statistics.median(sample[imports] for sample in found[name])
            rows.append(
                Row(
                    "first",
                    f"{label}, {name}, {model}",
                    statistics.median(samples),
                    "s",
                    baseline,
                    floor=floors.get(what),
                    at_most=True,
                    low=samples[0],
                    high=samples[-1],
                )
            )
    return rows


def _measure(model: str, caches: Path) -> dict[str, float]:
    """Return the seconds of one process to its first token and to its end, of the imports alone, and CPU seconds."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GRAFTLM_CACHE_DIR": str(caches)}
    started, started_cpu = time.time(), _cpu_s()
    _output([IMPORTS], environment)
    imported, imported_cpu = time.time(), _cpu_s()
    token, _ = (float(line) for line in _output([SCRIPT, model], environment).split())
    return {
        "imports": imported - started,
        "token": token - imported,
        "script": time.time() - imported,
        "imports CPU": imported_cpu - started_cpu,
        "script CPU": _cpu_s() - imported_cpu,
    }


def _cpu_s() -> float:
    """User and system seconds of all processes that were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _output(arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    command = ["-c", *arguments]
    return python_process.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
