"""`python -m bench page`: the tables of docs/benchmarks.md that come from committed figures, written anew."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.harness import ROOT
from bench.workloads._suite import BASELINE, geometric_mean
from graftlm.ab.statistics import Ratio

PAGE = ROOT / "docs/benchmarks.md"
BEGIN, END = "<!-- workloads: written by python -m bench page -->\n", "<!-- end of workloads -->\n"


def workloads(figures: dict[str, Any]) -> str:
    """The section of the twelve workloads, with what its figures do not say."""
    rows = figures["rows"]
    machine = figures["machine"]
    lines = [
        f"`{figures['command']}` at {figures['commit']}, {machine['processor']}, {machine['cores']} cores, one thread",
        "per engine, sprout in float32. A quarter of each full size was run. Other people share the machine:",
        "the ratio of CPU times, which other programs change less, stands beside that of wall times.",
        "",
        "| workload | framework | fastest other | seconds | GraftLM | ratio (95 %) | ratio of CPU time | "
        "answers right | answers equal | hit rate | best possible |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in rows:
        ours = one["engines"]["graftlm"]
        if "ratio" not in one:
            lines.append(f"| {one['workload']} | {one['framework']} | no engine has a figure | | | | | | | | |")
            continue
        theirs = one["engines"][one["best"]]
        wall = [f"{statistics.median(side['wall_s']):.2f}" for side in (theirs, ours)]
        counts = [f"{ours[key]} of {one['inputs']}" for key in ("right", "equal")]
        hits = ["–" if one[key] is None else f"{one[key]:.0%}" for key in ("hit_rate", "best_hit_rate")]
        cells = [one["workload"], one["framework"], one["best"], *wall, str(Ratio(**one["ratio"])),
                 f"{one['cpu_ratio']['value']:.2f}x", *counts, *hits]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    measured = [one for one in rows if "ratio" in one]
    means = [geometric_mean(one[by]["value"] for one in measured) for by in ("ratio", "cpu_ratio")]
    below = [f"{one['workload']} ({one['ratio']['value']:.2f}x)" for one in measured if one["ratio"]["value"] < 1]
    share = [one["hit_rate"] / one["best_hit_rate"] for one in measured if one["best_hit_rate"]]
    lines += [
        "",
        f"Geometric mean of {len(measured)} rows: {means[0]:.2f}x of wall time, {means[1]:.2f}x of CPU time. "
        + (f"Below 1: {', '.join(below)}." if below else "None is below 1."),
        f"Hit rate over the best possible, mean: {min(1.0, statistics.mean(share)):.1%}.",
        "",
        "What these figures do not say:",
        "",
        "- sprout has 13 million parameters: a call's fixed cost weighs more, and arithmetic less, than with a model",
        "  that people deploy.",
        "- Texts, questions and right answers are of sprout's own world; sizes are below those of the SGLang paper.",
        "- `hf` and `hf-batching` of a program are transformers behind the engine hook. `hf-batching` knows neither",
        "  choices nor schemas and is left out there; `hf` applies GraftLM's token mask.",
        "- The best possible hit rate counts prompts alone. Turns that go on from generated text can exceed it.",
        "- Every engine's prefix cache is emptied before each round. Until now that of `hf-batching` kept the prompts",
        "  of earlier rounds, which made it faster than a first run: 5.4 s for 8.0 s in `generative_agents`.",
        "- `generative_agents` and `retrieval` share and generate little: what is left is the arithmetic of prompts,",
        "  where both engines are near to the processor's limit.",
        "- `endings` is of an earlier run, b81cba1 on a busier machine; `tree_of_thought` is missing. `judge` was",
        "  measured before siblings of several prefixes waited for each other, so its hit rate is low.",
        "- vLLM, SGLang, llama.cpp and OpenVINO are not in this table.",
        "",
    ]
    return "\n".join(lines) + "\n"


def written(page: str, figures: dict[str, Any]) -> str:
    """The page with the section replaced."""
    before, _, rest = page.partition(BEGIN)
    _, found, after = rest.partition(END)
    assert found, f"{PAGE} has no section between {BEGIN!r} and {END!r}"
    return before + BEGIN + "\n" + workloads(figures) + END + after


def main(arguments: Sequence[str], page: Path = PAGE) -> int:
    """Write the page; with --check say whether it is up to date (exit status 1 if not)."""
    old = page.read_text()
    new = written(old, json.loads(BASELINE.read_text()))
    if "--check" in arguments:
        print("up to date" if old == new else "docs/benchmarks.md differs from its figures: python -m bench page",
              file=sys.stderr)  # fmt: skip
        return int(old != new)
    page.write_text(new)
    return 0
