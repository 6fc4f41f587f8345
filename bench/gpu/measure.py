"""python -m bench.gpu.measure ENGINE: the workloads on one engine, in this process; figures to a JSON file.

The file is written anew after every section, so that what was measured is kept if a later one never ends. Needs NumPy
and the engine only.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.gpu.workloads import Figures, Sizes, sections, warm_up

ENGINES = ("graftlm", "vllm", "sglang", "hf", "hf_batching")
TINY = 16
"""Divisor of the sizes with --tiny."""

TINY_VOCABULARY = (3, 250)


def wanted(name: str, only: str | None) -> bool:
    """Return True if a section, or one of its figures, is among those asked for."""
    return only is None or any(part in (name, name.rstrip("0123456789")) for part in only.split(","))


class Report:
    """The figures and errors of one engine's process so far."""

    def __init__(self, path: Path, engine: str) -> None:
        self.path = path
        self.found: dict[str, Any] = {"engine": engine, "figures": {}, "errors": {}}

    def run(self, name: str, measurement: Callable[[], Figures]) -> None:
        """Store the figures of one section, or the reason why there are none."""
        started = time.perf_counter()
        try:
            figures = measurement()
        except NotImplementedError as refusal:
            self.found["errors"][name] = str(refusal)
        except Exception as error:
            traceback.print_exc()
            self.found["errors"][name] = f"{type(error).__name__}: {str(error)[:300]}"
        else:
            self.found["figures"][name] = figures
        said = self.found["figures"].get(name) or self.found["errors"].get(name)
        print(f"[{time.perf_counter() - started:6.1f} s] {name}: {said}", flush=True)
        self.write()

    def write(self) -> None:
        beside = self.path.with_suffix(".part")
        beside.write_text(json.dumps(self.found, indent=1) + "\n")
        beside.replace(self.path)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.measure", description=__doc__)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--model", help="a folder with config.json and a tokenizer; weights are random")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", help="sections or figures, with commas: a,b,e or a64,start")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="a tiny model and small workloads, on any device")
    given = parser.parse_args(arguments)
    sizes = Sizes().divided(TINY, TINY_VOCABULARY) if given.tiny else replace(Sizes(), rounds=given.rounds)
    report = Report(given.out, given.engine)
    began = time.perf_counter()
    module = importlib.import_module(f"bench.gpu.engine_{given.engine}")
    try:
        engine = module.start(None if given.tiny else given.model)
        engine.generate([[5, 6, 7]], 1)
    except Exception as error:
        traceback.print_exc()
        report.found["errors"]["start"] = f"{type(error).__name__}: {str(error)[:300]}"
        report.write()
        return 1
    report.found["about"] = engine.about
    report.run("start", lambda: {"process_to_first_token_s": time.perf_counter() - began, **engine.started})
    report.run("warm-up", lambda: warm_up(engine, sizes))
    gc.collect()
    gc.freeze()  # else a garbage collection within a step would scan all that the engine has loaded and compiled
    for name, section in sections(sizes).items():
        if wanted(name, given.only):
            report.run(name, lambda section=section: section(engine))  # type: ignore[misc]
    for name, extra in getattr(module, "EXTRAS", {}).items():
        if wanted(name, given.only):
            report.run(name, lambda extra=extra: extra(engine, sizes))  # type: ignore[misc]
    engine.close()
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # engines leave threads and processes behind that a plain end would wait for
