"""`python -m bench page`: write docs/benchmarks.md and bench/notes/workloads.md from committed figures."""

from __future__ import annotations

import itertools
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
NOTES = ROOT / "bench/notes/workloads.md"
BEGIN, END = "<!-- workloads: written by python -m bench page -->\n", "<!-- end of workloads -->\n"


SHARES = {
    0.25: "A quarter of each full size, which `make bench` runs too",
    0.5: "Half of each full size",
    1.0: "Full size",
}
COLUMNS = ("workload", "framework", "fastest other", "seconds", "GraftLM", "ratio (95 %)", "ratio of CPU time",
           "answers right", "answers equal", "hit rate", "best possible", "at")  # fmt: skip


def summary(figures: dict[str, Any]) -> str:
    """Return the section of docs/benchmarks.md: one table, of the full-size programs."""
    rows = [one for one in figures["rows"] if one["share"] == 1.0 and one["framework"] == "native" and "ratio" in one]
    lines = ["| workload | fastest other engine | its time | GraftLM | ratio (95 %) | answers right | hit rate |"]
    lines.append("|---" * 7 + "|")
    for one in rows:
        ours, theirs = one["engines"]["graftlm"], one["engines"][one["best"]]
        wall = [f"{statistics.median(side['wall_s']):.2f} s" for side in (theirs, ours)]
        right = f"{ours['right']} of {one['inputs']}"
        hits = "–" if one["hit_rate"] is None else f"{one['hit_rate']:.0%}"
        cells = [one["workload"].replace("_", " "), one["best"], *wall, str(Ratio(**one["ratio"])), right, hits]
        lines.append(f"| {' | '.join(cells)} |")
    mean = geometric_mean(one["ratio"]["value"] for one in rows)
    return "\n".join([*lines, "", f"The geometric mean of the ratios is {mean:.2f}.", ""]) + "\n"


def workloads(figures: dict[str, Any]) -> str:
    """Return the section of bench/notes/workloads.md: all tables, and their caveats."""
    own = figures["machine"]["processor"]
    known = [{"processor": own} | one for one in figures["rows"]]
    processors = list(dict.fromkeys(one["processor"] for one in known))
    lines = [
        f"Two cores, sprout in float32, on {' and '.join(processors)}. Other people",
        "share the machines: the ratio of CPU times, which they change less, stands beside that of wall times.",
        "`at` is the commit that was measured. Each row is",
        "`python -m bench workloads NAME --frameworks FRAMEWORK --threads THREADS`.",
        "",
    ]
    kinds = ((True, "as GraftLM's programs"), (False, "in other frameworks"))
    threads = sorted({one["threads"] for one in known})
    for processor, (share, said), (native, what), number in itertools.product(
        processors, SHARES.items(), kinds, threads
    ):
        asked = (processor, share, native, number)
        chosen = [one for one in known if _kind(one) == asked]
        lines += _table(chosen, f"{said}, {what}, {_threads(number)} per engine, {processor}:") if chosen else []
    return "\n".join([*lines, *CAVEATS, ""]) + "\n"


def _kind(one: dict[str, Any]) -> tuple[str, float, bool, int]:
    return one["processor"], one["share"], one["framework"] == "native", one["threads"]


def _threads(number: int) -> str:
    return f"{number} thread" if number == 1 else f"{number} threads"


def _table(rows: Sequence[dict[str, Any]], title: str) -> list[str]:
    lines = [title, "", f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    lines += [_line(one) for one in rows]
    measured = [one for one in rows if "ratio" in one]
    lines += ["", *(_sums(measured) if measured else [])]
    told = [(_name(one), [*one.get("differences", []), *one.get("load", [])[:1]]) for one in rows]
    return [*lines, *(f"- {name}: {' '.join(said)}" for name, said in told if said), ""]


def _sums(measured: Sequence[dict[str, Any]]) -> list[str]:
    means = [geometric_mean(one[by]["value"] for one in measured) for by in ("ratio", "cpu_ratio")]
    below = [f"{_name(one)} ({one['ratio']['value']:.2f}x)" for one in measured if one["ratio"]["value"] < 1]
    known = [one for one in measured if one["best_hit_rate"]]
    best = sum(one["best_hit_rate"] * one["engines"]["graftlm"]["prompt_tokens"] for one in known)
    found = sum(
        min(one["hit_rate"], one["best_hit_rate"]) * one["engines"]["graftlm"]["prompt_tokens"] for one in known
    )
    lines = [
        f"Geometric mean of {len(measured)} rows: {means[0]:.2f}x of wall time, {means[1]:.2f}x of CPU time. "
        + (f"Below 1: {', '.join(below)}." if below else "None is below 1."),
    ]
    if any("llama-cpp" in one["engines"] for one in measured):
        without = [over for one in measured if (over := _over_transformers(one)) is not None]
        rows = "" if len(without) == len(measured) else f", in {len(without)} rows that have one"
        mean = geometric_mean(without)
        lines.append(f"Without llama.cpp, over the faster of hf and hf-batching{rows}: {mean:.2f}x of wall time.")
    if best:
        lines.append(f"Prompt tokens from the cache, over those that could have come from it: {found / best:.1%}.")
    return [*lines, ""]


def _over_transformers(one: dict[str, Any]) -> float | None:
    """Return the time of the faster transformers engine over GraftLM's, by median wall times; None if not measured."""
    engines = one["engines"]
    walls = [
        statistics.median(engines[name]["wall_s"])
        for name in ("hf", "hf-batching")
        if "wall_s" in engines.get(name, {})
    ]
    return min(walls) / statistics.median(engines["graftlm"]["wall_s"]) if walls else None


def _line(one: dict[str, Any]) -> str:
    if "ratio" not in one:
        why = "; ".join(f"{name}: {e['error']}" for name, e in one["engines"].items() if e.get("error"))
        return f"| {one['workload']} | {one['framework']} | {' '.join(why.split()).replace('|', '/')[:200]}" + " |" * 10
    ours, theirs = one["engines"]["graftlm"], one["engines"][one["best"]]
    wall = [f"{statistics.median(side['wall_s']):.2f}" for side in (theirs, ours)]
    counts = [f"{ours[key]} of {one['inputs']}" for key in ("right", "equal")]
    hits = ["–" if one[key] is None else f"{one[key]:.0%}" for key in ("hit_rate", "best_hit_rate")]
    cells = [one["workload"], one["framework"], one["best"], *wall, str(Ratio(**one["ratio"])),
             f"{one['cpu_ratio']['value']:.2f}x", *counts, *hits, one["commit"]]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _name(one: dict[str, Any]) -> str:
    return one["workload"] if one["framework"] == "native" else f"{one['workload']} in {one['framework']}"


CAVEATS = """\
What these figures do not say:

- sprout has 13 million parameters: a call's fixed cost weighs more, and arithmetic less, than with a model
  that people deploy.
- Texts, questions and right answers are of sprout's own world; sizes are below those of the SGLang paper.
- `hf` and `hf-batching` of a program are transformers behind the engine hook. `hf-batching` knows neither
  choices nor schemas and is left out there; `hf` applies GraftLM's token mask.
- In other frameworks `hf` is the framework's own class for transformers, and `hf-batching` its OpenAI client at
  `transformers serve`, which has 256 blocks of KV cache on a CPU, as in the process.
- `tree_of_thought` has one size. At full size only those engines ran beside GraftLM that had been the fastest at a
  quarter: all in `generative_agents`, `judge`, `retrieval` and `word_problems`, hf and llama.cpp in `json_objects`,
  hf-batching and llama.cpp in `chats` and `react`, else the fastest one. In `skeleton_of_thought` that was
  hf-batching, which took 39 s at full size; llama.cpp was faster.
- The best possible hit rate counts prompts alone. Turns that go on from generated text can exceed it.
- Every engine's prefix cache is emptied before each round.
- Engines in other frameworks have a thread for each core, as their users would run them: several Python threads of
  a batch compute beside each other whatever an engine's number of threads is, in `hf` behind LangChain for one.
- The clients for OpenAI's API behind which `hf-batching` runs were in an environment of their own
  (`langchain-openai`, `llama-index-llms-openai-like`, `dspy`): `--python hf-batching=PATH`.
- `generative_agents` and `retrieval` share and generate little: what is left is the arithmetic of prompts,
  where both engines are near to the processor's limit. In a profile at dd10aa6 GraftLM's 1.45 s of
  `generative_agents` were 0.89 of matrix products, at 96 of the 105 GFLOP/s that they reach alone here, 0.19 of
  attention and 0.17 of decode steps of one row.
- `llama-cpp` is llama-cpp-python in the process, on the programs' token ids, one request after the other; it goes on
  with the last prompt as far as the next one is equal. Its own tokenizer knows none like sprout's, so it is not
  behind other frameworks. vLLM and SGLang are not in these tables.
- Rows with OpenVINO ran on optimum-intel 2.2.0, which wants transformers below 5.6, in an environment of its own, in
  float32 and with as many threads as the other engines. `graftlm ab` has no such engine any more.
  `python -m bench cpu` compares with OpenVINO GenAI on token ids.
""".splitlines()


def written(page: str, section: str) -> str:
    """Return the page with its marked section replaced."""
    before, _, rest = page.partition(BEGIN)
    _, found, after = rest.partition(END)
    assert found, f"the page has no section between {BEGIN!r} and {END!r}"
    return before + BEGIN + "\n" + section + END + after


def pages() -> dict[Path, tuple[str, str]]:
    """Return the old and the new text of each page."""
    figures = json.loads(BASELINE.read_text())
    sections = {PAGE: summary(figures), NOTES: workloads(figures)}
    return {path: (old := path.read_text(), written(old, section)) for path, section in sections.items()}


def main(arguments: Sequence[str]) -> int:
    """Write the pages; with --check say whether they are up to date (exit status 1 if not)."""
    stale = {path: new for path, (old, new) in pages().items() if old != new}
    if "--check" in arguments:
        names = " and ".join(str(path.relative_to(ROOT)) for path in stale)
        print(f"run python -m bench page: {names} differ from the figures" if stale else "up to date", file=sys.stderr)
        return int(bool(stale))
    for path, new in stale.items():
        path.write_text(new)
    return 0
