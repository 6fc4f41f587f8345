"""GraftLM and its rivals on a CPU, each in its own process, measured in turns on the same tokens."""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from bench.cpu._models import Precision, write_gguf, write_openvino, write_random
from bench.harness import ROOT, Options, Row
from bench.models import Size
from graftlm.kernels.jit import python_process

OURS = "GraftLM"
NEEDS = {"llama.cpp": ("llama_cpp", "gguf"), "OpenVINO": ("openvino_genai",)}
NAMES: dict[Size, str] = {"tiny": "tiny", "30M": "28M", "450M": "443M"}


Floor = TypeVar("Floor")


def chosen(
    floors: Mapping[tuple[Size, Precision], Floor], options: Options
) -> list[tuple[tuple[Size, Precision], Floor]]:
    """Return a case's models with their floors: labels that contain `--model`; by default all, or the small ones.

    Raises SystemExit, naming the labels, if none matches.
    """
    if options.model is None:
        return [(key, floor) for key, floor in floors.items() if not options.quick or key[0] == "30M"]
    labels = {key: f"{NAMES[key[0]]} {key[1]}" for key in floors}
    found = [(key, floor) for key, floor in floors.items() if options.model in labels[key]]
    if not found:
        raise SystemExit(f"--model {options.model!r} is in none of: {', '.join(labels.values())}")
    return found


class Worker:
    """A process with one engine; see `_worker.py`."""

    def __init__(self, engine: str, model: Path, precision: Precision, activations: str = "exact") -> None:
        self.engine = engine
        threads = os.process_cpu_count() if sys.version_info >= (3, 13) else len(os.sched_getaffinity(0))
        command = ["-m", "bench.cpu._worker", engine, str(model), precision, str(threads), activations]
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115, closed with the worker
        self._process = python_process.start(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=environment
        )

    def ask(
        self,
        prompts: Sequence[Any],
        num_new: int,
        *,
        shared: int = 0,
        speculation: str = "off",
        schema: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the worker's answer; raise RuntimeError with the end of its output if it has died."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        asked = {
            "prompts": prompts, "num_new": num_new, "shared": shared, "speculation": speculation, "schema": schema
        }  # fmt: skip
        line = ""
        try:
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            pass
        if not line:
            self._errors.seek(0)
            raise RuntimeError(f"{self.engine} ended: {self._errors.read()[-2000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self._process.communicate()
        self._errors.close()


class Engines(AbstractContextManager["Engines"]):
    """Start one worker for each installed engine, on the same weights."""

    def __init__(
        self,
        size: Size,
        precision: Precision,
        folder: Path,
        model: Path | None = None,
        only: tuple[str, ...] | None = None,
    ) -> None:
        self.label = f"{model.name if model else NAMES[size]} {precision}"
        model = model or write_random(size, folder)
        places = {OURS: model}
        for name in NEEDS if only is None else only:
            modules = NEEDS[name]
            missing = [module for module in modules if importlib.util.find_spec(module) is None]
            try:
                if missing:
                    raise RuntimeError(f"{missing[0]} is not installed: pip install graftlm[bench-cpu]")
                places[name] = write_gguf(model, precision) if name == "llama.cpp" else write_openvino(model, precision)
            except RuntimeError as error:
                Console(stderr=True).print(f"without {name}: {error}", markup=False)
        self.workers = {name: Worker(name, place, precision) for name, place in places.items()}

    def __exit__(self, *exception: object) -> None:
        for worker in self.workers.values():
            worker.close()


def compared(case: str, label: str, rates: dict[str, list[float]], floor: float | None, unit: str) -> list[Row]:
    """Return a row per rival, then GraftLM's beside the best rival's; ratios are medians over paired rounds."""
    rows = [_row(case, f"{label}, {name}", samples, unit) for name, samples in rates.items() if name != OURS]
    ours = rates[OURS]
    best = max(rows, key=lambda row: row.value, default=None)
    if best is None:
        return [_row(case, f"{label}, {OURS}", ours, unit)]
    theirs = rates[best.what.rsplit(", ", 1)[1]]
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    return [*rows, _row(case, f"{label}, {OURS}", ours, unit, baseline=best.value, ratio=ratio, floor=floor)]


def _row(case: str, what: str, samples: list[float], unit: str, **rest: Any) -> Row:
    return Row(case, what, statistics.median(samples), unit, low=min(samples), high=max(samples), **rest)


def model_folder() -> Path:
    """Return the folder of the models: $GRAFTLM_BENCH_MODELS, which is kept, or one that ends with this process."""
    kept = os.environ.get("GRAFTLM_BENCH_MODELS")
    if kept is None:
        _temporary.append(tempfile.TemporaryDirectory())
        return Path(_temporary[-1].name)
    return Path(kept)


_temporary: list[tempfile.TemporaryDirectory[str]] = []
"""Temporary folders, deleted when this process ends."""
