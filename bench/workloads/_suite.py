"""`python -m bench workloads`: twelve workloads on sprout in float32, GraftLM beside transformers, in each framework.

Every row is an A/B comparison of `graftlm.ab`: interleaved rounds, a process per engine, the same threads. The ratio is
that of the fastest other engine over GraftLM.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.cpu._models import write_gguf
from bench.harness import origin
from graftlm.ab import Comparison, EngineResult, compare
from graftlm.ab.comparison import MIN_PAIRS
from graftlm.ab.engines.frameworks import named_engines
from graftlm.ab.engines.other_python import read_pythons
from graftlm.ab.statistics import Z_95, Ratio, ratio
from graftlm.core.errors import ConfigError
from graftlm.core.model.embedded import sprout_folder
from graftlm.progress import Progress

FOLDER = Path(__file__).parent
BASELINE = FOLDER / "baseline.json"
OTHERS = {"native": ("hf", "hf-batching", "llama-cpp"), "langchain": ("hf", "hf-batching"),
          "dspy": ("hf", "hf-batching"), "llama_index": ("hf", "hf-batching"), "guidance": ("guidance",)}  # fmt: skip
"""Engines compared with GraftLM, by framework. Guidance's programs run on no endpoint: text and `gen` alternate.
llama.cpp, where it is installed, has no tokenizer like sprout's: it is given the token ids of programs alone."""
NO_BATCHING = {"endings", "json_objects"}
"""Programs with choices or schemas, which transformers' continuous batching does not have."""
BETWEEN_PROCESSORS = 0.18
"""Standard deviation of the logarithm of a ratio between kinds of processors: one may suit an engine's loops more than
another. Of twelve workloads on an AMD EPYC and an Intel Xeon it was 0.17."""
SHARE = "GRAFTLM_BENCH_SHARE"
"""Environment variable with the share of each workload that is run."""


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.py") if not path.name.startswith("_"))


def frameworks(name: str) -> list[str]:
    """Return the frameworks in which a workload is written, the native program first."""
    found = re.findall(r"^(?:async )?def run_(\w+)\(", (FOLDER / f"{name}.py").read_text(), re.MULTILINE)
    return sorted(found, key=lambda one: (one != "native", one))


def float32_sprout(folder: Path) -> str:
    """sprout with its weights in float32, so that greedy answers can be compared token by token."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(sprout_folder(), dtype=torch.float32).save_pretrained(folder)
    AutoTokenizer.from_pretrained(sprout_folder()).save_pretrained(folder)
    if has_llama_cpp():
        write_gguf(folder, "float32")
    return str(folder)


def has_llama_cpp() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in ("llama_cpp", "gguf"))


def eight_billion(folder: Path) -> str:
    """Return a model of 8 billion random bfloat16 weights, written to disk for servers. Needs a GPU."""
    import torch

    from bench.gpu.model import random_weights, write

    model, _ = random_weights(str(write(folder)))
    model.save_pretrained(folder)
    del model
    torch.cuda.empty_cache()
    return str(folder)


def row(compared: Comparison, framework: str) -> dict[str, Any]:
    """Return the figures of one comparison, whose last engine is GraftLM."""
    *others, ours = compared.results
    measured = [one for one in others if one.rounds]
    found: dict[str, Any] = {
        "workload": compared.name,
        "framework": framework,
        "inputs": len(compared.inputs),
        "differences": compared.differences(),
        "engines": {result.engine: _engine(compared, result) for result in compared.results},
    }
    if not measured or not ours.rounds:
        return found
    best = min(measured, key=lambda one: compared.median_of(one, "wall_s"))
    if compared.ratio(ours, best) is None:  # no model was asked, or other programs took the cores
        return found | {"load": compared.load()}
    return found | {
        "best": best.engine,
        "ratio": _as_json(compared.ratio(ours, best)),
        "cpu_ratio": _as_json(compared.ratio(ours, best, "cpu_s")),
        "load": compared.load(),
        "hit_rate": ours.work.hit_rate,
        "best_hit_rate": ours.best_hit_rate,
    }


def _engine(compared: Comparison, result: EngineResult) -> dict[str, Any]:
    if not result.rounds:
        return {"error": result.error}
    return {
        "wall_s": [round(one.wall_s, 4) for one in result.rounds],
        "cpu_s": [round(one.cpu_s, 4) for one in result.rounds],
        "right": compared.num_right(result),
        "equal": compared.num_equal(result),
        **dataclasses.asdict(result.work),
    }


def _as_json(found: Ratio | None) -> dict[str, Any] | None:
    return None if found is None else dataclasses.asdict(found)


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def key_of(one: dict[str, Any]) -> tuple[str, str, float, int]:
    """Return the key of a row: workload, framework, share of the full size, threads of an engine."""
    return one["workload"], one["framework"], one["share"], one["threads"]


def rows_for(rows: Sequence[dict[str, Any]], processor: str) -> dict[tuple[str, str, float, int], dict[str, Any]]:
    """Return one row for each key of `key_of`: that of this processor, or of another one where it has none."""
    return {key_of(one): one for one in sorted(rows, key=lambda one: bool(one["processor"] == processor))}


def fastest(others: Sequence[str], before: dict[str, Any] | None) -> list[str]:
    """Return the fastest of `others` in an earlier row, the only one that must be measured again; else all."""
    walls = {} if before is None else {name: one.get("wall_s") for name, one in before["engines"].items()}
    known = [name for name in others if walls.get(name)]
    return [min(known, key=lambda name: _middle(walls[name]))] if known else list(others)


def lost(found: Sequence[dict[str, Any]], before: Sequence[dict[str, Any]], by: str = "cpu_ratio") -> list[str]:
    """Return the rows whose ratio lies below the earlier one's, its whole interval below that one's.

    Both are over the engine that is the fastest other one now, where it was measured before too. The interval of a row
    that was measured on another kind of processor is wider by BETWEEN_PROCESSORS.
    """
    known = {key_of(one): one for one in before if by in one}
    said = []
    for one in found:
        old = known.get(key_of(one))
        if old is None:
            continue
        name = f"{one['workload']} in {one['framework']}"
        if by not in one:
            said.append(f"{name}: no ratio any more: {one['engines']}")
            continue
        now, then = Ratio(**one[by]), _over(old, one.get("best"), by)
        if one.get("processor") != old.get("processor"):
            then = _elsewhere(then)
        if (now.high or now.value) < (then.low or then.value):
            said.append(f"{name}: {now}, before {then}")
    return said


def _elsewhere(found: Ratio) -> Ratio:
    """Return a ratio with the interval that it has for other kinds of processors."""
    low, high = found.low or found.value, found.high or found.value
    apart = Z_95 * BETWEEN_PROCESSORS
    below, above = (math.hypot(math.log(bound / found.value), apart) for bound in (low, high))
    return Ratio(found.value, found.value * math.exp(-below), found.value * math.exp(above))


def _over(one: dict[str, Any], engine: str | None, by: str) -> Ratio:
    """Return the ratio of a row over one of its other engines, or over its fastest one if that has no figures."""
    times = f"{by.removesuffix('_ratio')}_s"
    theirs, ours = (one.get("engines", {}).get(name, {}).get(times) for name in (engine, "graftlm"))
    if engine == one.get("best") or not theirs or not ours:
        return Ratio(**one[by])
    num = min(len(theirs), len(ours))
    first = int(num > MIN_PAIRS)  # see `Comparison.counted`
    return ratio(theirs[first:num], ours[first:num])


def table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    drawn = Table("workload", "framework", title=title)
    for column in ("best other", "seconds", "GraftLM", "ratio", "of CPU time", "right", "equal", "hit rate", "best"):
        drawn.add_column(column, justify="right")
    for one in rows:
        ours = one["engines"].get("graftlm", {})
        if "ratio" not in one:
            errors = "; ".join(str(e.get("error")) for e in one["engines"].values() if "error" in e)
            drawn.add_row(one["workload"], one["framework"], f"failed: {errors[:60]}")
            continue
        theirs = one["engines"][one["best"]]
        drawn.add_row(
            one["workload"], one["framework"], one["best"],
            f"{_middle(theirs['wall_s']):.2f}", f"{_middle(ours['wall_s']):.2f}",
            str(Ratio(**one["ratio"])), f"{one['cpu_ratio']['value']:.2f}x",
            f"{ours['right']}/{one['inputs']}", f"{ours['equal']}/{one['inputs']}",
            _share(one["hit_rate"]), _share(one["best_hit_rate"]),
        )  # fmt: skip
    return drawn


def _middle(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def summary(rows: Sequence[dict[str, Any]], by: str = "ratio") -> dict[str, float]:
    """Geometric mean and smallest ratio by framework."""
    found = {}
    for framework in dict.fromkeys(one["framework"] for one in rows):
        values = [one[by]["value"] for one in rows if one["framework"] == framework and by in one]
        if values:
            found |= {f"{framework}, geometric mean": geometric_mean(values), f"{framework}, smallest": min(values)}
    return found


def main(arguments: Sequence[str]) -> int:
    """Exit status 1 if a ratio is lost against `--against`."""
    parser = argparse.ArgumentParser(prog="python -m bench workloads", description=f"Workloads: {', '.join(names())}.")
    parser.add_argument("workloads", nargs="*", help="which; all if none is named")
    parser.add_argument("--frameworks", default="native", help="comma-separated, or 'all' (default native)")
    parser.add_argument(
        "--others",
        help="engines to compare with, comma-separated, in place of the usual ones; vllm:URL is a running server",
    )
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        metavar="ENGINE=PATH",
        help="the Python of an engine whose client is in another environment",
    )
    parser.add_argument("--quick", action="store_true", help="a quarter of each workload")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, help="for the rounds of each comparison (default 1, --quick 0.2)")
    parser.add_argument("--threads", type=int, default=1, help="compute threads of every engine (default 1)")
    parser.add_argument("--model", help="a folder in place of sprout in float32; 8b: random weights of that shape, GPU")
    parser.add_argument("--json", type=Path, dest="output", help="write the figures; rows of other workloads are kept")
    parser.add_argument(
        "--against",
        type=Path,
        help="fail where a ratio of CPU times is lost against these figures, over the fastest other engine in them",
    )
    given = parser.parse_args(arguments)
    if unknown := set(given.workloads) - set(names()):
        parser.error(f"no workload {sorted(unknown)[0]!r}; known: {', '.join(names())}")
    given.minutes = given.minutes or (0.2 if given.quick else 1.0)
    if given.quick:
        os.environ[SHARE] = "0.25"
    pythons = read_pythons(given.python)
    share = float(os.environ.get(SHARE, "1"))
    rows: list[dict[str, Any]] = []
    before = {} if given.against is None else rows_for(_read(given.against), _run()["processor"])
    with tempfile.TemporaryDirectory() as folder:
        model = eight_billion(Path(folder)) if given.model == "8b" else given.model or float32_sprout(Path(folder))
        for name in given.workloads or names():
            wanted = frameworks(name) if given.frameworks == "all" else given.frameworks.split(",")
            for framework in (one for one in wanted if one in frameworks(name)):
                others = given.others.split(",") if given.others else OTHERS[framework]
                skipped = {"hf-batching"} if framework == "native" and name in NO_BATCHING else set()
                skipped |= set() if given.others or has_llama_cpp() else {"llama-cpp"}
                known = named_engines(framework, 1)
                kinds = {one: one.partition(":")[0] for one in others}
                chosen = [one for one in others if kinds[one] in known and kinds[one] not in skipped]
                chosen = fastest(chosen, before.get((name, framework, share, given.threads)))
                if not chosen:
                    print(f"{name} in {framework}: none of {', '.join(others)} is known there", file=sys.stderr)
                    continue
                try:
                    compared = compare(
                        FOLDER / f"{name}.py", [*chosen, "graftlm"], model, rounds=given.rounds, minutes=given.minutes,
                        threads=given.threads, framework=framework, progress=Progress(),
                        pythons={engine: python for engine, python in pythons.items() if engine in chosen},
                    )  # fmt: skip
                except ConfigError as error:  # an engine cannot run such a program
                    measured: dict[str, Any] = {"workload": name, "framework": framework}
                    measured["engines"] = {one: {"error": str(error)} for one in chosen}
                else:
                    measured = row(compared, framework)
                rows.append(measured | {"share": share, "threads": given.threads} | _run())
                if given.output:
                    _write(given.output, rows)
    console = Console(width=None if sys.stdout.isatty() else 170)
    console.print(table(rows, f"workloads, {given.threads} thread(s), {origin()['commit']}"))
    for name, value in summary(rows).items():
        console.print(f"{name}: {value:.2f}x")
    if given.against is None:
        return 0
    failures = lost(rows, list(before.values()))
    for line in failures:
        print(f"lost: {line}", file=sys.stderr)
    return int(bool(failures))


def _run() -> dict[str, Any]:
    """Return the provenance of a row, since a file contains rows of several runs."""
    found = origin()
    return {key: found[key] for key in ("command", "commit", "at")} | {"processor": found["machine"]["processor"]}


def _read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file. Rows without a processor get the file's."""
    written = json.loads(path.read_text())
    known = {"processor": written["machine"]["processor"]}
    return [known | one for one in written["rows"]]


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write figures; rows of earlier runs that this one has not measured again on its processor stay."""
    new = {(key_of(one), one["processor"]) for one in rows}
    before = _read(path) if path.is_file() else []
    kept = [one for one in before if (key_of(one), one["processor"]) not in new]
    found = sorted(
        [*kept, *rows],
        key=lambda one: (one["processor"], -one["share"], one["workload"], one["framework"] != "native"),
    )
    path.write_text(json.dumps({"machine": origin()["machine"], "rows": found}, indent=1) + "\n")
