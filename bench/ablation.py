"""`python -m bench ablation`: the effect of each part of the runtime on the workloads, measured without it.

All variants run in one process on sprout in float32, in turns. CPU time is compared, since it hardly depends on other
load; the hit rate is printed beside the best one of an unlimited cache.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.harness import origin
from bench.models import random_ids
from bench.workloads._suite import FOLDER, float32_sprout
from graftlm import CacheConfig, Runtime, SchedulerConfig
from graftlm.ab.measure.meter import Meter
from graftlm.ab.measure.profile import num_unique
from graftlm.ab.pipeline import Pipeline
from graftlm.core.grammar import cache as grammar_cache
from graftlm.core.program.program import Program

WORKLOADS = ("few_shot_choice", "tree_of_thought", "skeleton_of_thought", "judge", "json_objects", "chats", "retrieval")
SMALL_POOL = 6144
"""KV slots of the variants that compare orders and evictions: fewer than the workloads' prompts need together."""


@contextmanager
def without_batch_prefix(runtime: Runtime) -> Iterator[None]:
    """Start the programs of a batch one by one, without computing their common prefix first."""
    batch = Program.batch

    def one_by_one(self: Any, items: Any, *, runtime: Any) -> list[Any]:
        return [self.run(**item, runtime=runtime) for item in items]

    Program.batch = one_by_one  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Program.batch = batch  # type: ignore[method-assign]


@contextmanager
def rebuilding_grammars(runtime: Runtime) -> Iterator[None]:
    """Compile the constraint of every request anew."""
    submit_many, complete = runtime.submit_many, runtime.complete

    def submitted(requests: Any) -> Any:
        futures = []
        for request in requests:
            grammar_cache._shared.clear()
            futures += submit_many([request])
        return futures

    runtime.submit_many = submitted  # type: ignore[method-assign]
    runtime.complete = lambda request: submitted([request])[0].result()  # type: ignore[method-assign]
    try:
        yield
    finally:
        runtime.submit_many, runtime.complete = submit_many, complete  # type: ignore[method-assign]


@dataclass(frozen=True)
class Variant:
    """A runtime with one part left out. `beside` names the variant that has it."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    beside: str = "everything"
    around: Callable[[Runtime], Any] | None = None
    only: tuple[str, ...] = ()


def _small(**options: Any) -> dict[str, Any]:
    policy = options.pop("policy", "lpm")
    return {"cache": CacheConfig(max_tokens=SMALL_POOL, **options), "schedule": SchedulerConfig(policy=policy),
            "max_batch": 8}  # fmt: skip


CONSTRAINED = ("json_objects",)
VARIANTS = (
    Variant("everything"),
    Variant("no prefix cache", {"cache": CacheConfig(enabled=False)}),
    Variant("pages of 256 tokens", {"cache": CacheConfig(page_size=256)}),
    Variant("no batch prefix", around=without_batch_prefix),
    Variant("one request at a time", {"max_batch": 1}),
    Variant("no shared-prefix decode", {"shared_prefix_decode": False}),
    Variant("overlap", {"overlap": True}),
    Variant("no speculation", {"speculation": "off"}),
    Variant("no jump-forward", {"jump_forward": False}, only=CONSTRAINED),
    Variant("grammar rebuilt per request", around=rebuilding_grammars, only=CONSTRAINED),
    Variant("small pool", _small()),
    Variant("small pool, first come", _small(policy="fcfs"), beside="small pool"),
    Variant("small pool, random order", _small(policy="random"), beside="small pool"),
    Variant("small pool, LFU", _small(eviction="lfu"), beside="small pool"),
)


def measure(name: str, variants: Sequence[Variant], model: str, rounds: int) -> dict[str, Any]:
    """CPU seconds, computed tokens and hit rate of each variant on one workload, and the best hit rate."""
    pipeline = Pipeline.load(FOLDER / f"{name}.py", "native")
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        runtimes = {v.name: stack.enter_context(Runtime(model, **v.options)).load() for v in variants}
        answers = {}
        for number in range(rounds + 1):
            for variant in variants:
                runtime = runtimes[variant.name]
                runtime.clear_cache()
                runtime.reset_stats()
                with variant.around(runtime) if variant.around else ExitStack():
                    started = time.process_time()
                    answers[variant.name] = pipeline.answer(runtime, pipeline.inputs)
                    spent = time.process_time() - started
                if number == 0:  # the first is a warm-up
                    continue
                stats = runtime.stats()
                row = found.setdefault(variant.name, {"cpu_s": []})
                row["cpu_s"].append(spent)
                row |= {"computed_tokens": stats.computed_tokens, "hit_rate": stats.hit_rate, "steps": stats.steps}
        for variant in variants:
            found[variant.name]["same_answers"] = answers[variant.name] == answers["everything"]
        return {"variants": found, "best_hit_rate": _best_hit_rate(pipeline, runtimes["everything"])}


def _best_hit_rate(pipeline: Pipeline, runtime: Runtime) -> float:
    meter = Meter()
    meter.attach()
    with meter.watch():
        pipeline.answer(runtime, pipeline.inputs)
    calls = meter.calls()
    prompts = [call.prompt_ids for call in calls]
    return 1 - num_unique(prompts, [call.token_ids for call in calls]) / sum(map(len, prompts))


def unshared(model: str, rounds: int) -> dict[str, list[float]]:
    """CPU seconds of 16 prompts of 200 tokens that share nothing, 8 new ones each: with the radix tree and without."""
    found: dict[str, list[float]] = {"with": [], "without": []}
    with Runtime(model) as on, Runtime(model, cache=CacheConfig(enabled=False)) as off:
        for number in range(rounds + 1):
            prompts = [random_ids(200, seed=1000 * number + i) for i in range(16)]
            for name, runtime in (("with", on), ("without", off)):
                started = time.process_time()
                runtime.generate(prompts, max_tokens=8, temperature=0, ignore_eos=True)
                if number:
                    found[name].append(time.process_time() - started)
    return found


def table(found: dict[str, Any]) -> Table:
    """CPU time of each variant over that of the one it is compared with, by workload; below 1 the part costs."""
    drawn = Table("left out", *found, title="CPU time without the part, over CPU time with it")
    for variant in VARIANTS[1:]:
        cells = []
        for workload in found.values():
            row, with_it = (workload["variants"].get(name) for name in (variant.name, variant.beside))
            cells.append("" if row is None else f"{_cpu(row) / _cpu(with_it):.2f} ({row['hit_rate']:.0%})")
        drawn.add_row(variant.name, *cells)
    drawn.add_section()
    hits = [(w["variants"]["everything"]["hit_rate"], w["best_hit_rate"]) for w in found.values()]
    drawn.add_row("hit rate, all on", *(f"{hit:.1%}" for hit, _ in hits))
    drawn.add_row("best hit rate", *(f"{best:.1%}" for _, best in hits))
    return drawn


def _cpu(row: dict[str, Any]) -> float:
    return statistics.median(row["cpu_s"])


def figure(found: dict[str, Any], path: Path) -> None:
    """Draw one group of bars per workload: CPU time of each variant over the complete runtime's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn, axes = pyplot.subplots(1, len(found), figsize=(3 * len(found), 4), sharey=True, layout="constrained")
    for axis, (name, workload) in zip(list(axes) if len(found) > 1 else [axes], found.items(), strict=True):
        rows = [(v.name, workload["variants"][v.name]) for v in VARIANTS if v.name in workload["variants"]]
        base = _cpu(workload["variants"]["everything"])
        axis.barh([label for label, _ in rows], [_cpu(row) / base for _, row in rows], color="tab:blue")
        axis.axvline(1, color="grey", linewidth=0.8)
        axis.invert_yaxis()
        axis.set_title(name, fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    drawn.savefig(path, dpi=120)
    pyplot.close(drawn)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench ablation", description=f"Workloads: {', '.join(WORKLOADS)}.")
    parser.add_argument("workloads", nargs="*", metavar="workload", help="which; all if none is named")
    parser.add_argument("--quick", action="store_true", help="a quarter of each workload, one round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, dest="output", help="write the figures")
    parser.add_argument("--figure", type=Path, help="write the bars as a PNG")
    given = parser.parse_args(arguments)
    if unknown := set(given.workloads) - set(WORKLOADS):
        parser.error(f"no workload {sorted(unknown)[0]!r}; known: {', '.join(WORKLOADS)}")
    if given.quick:
        os.environ["GRAFTLM_BENCH_SHARE"] = "0.25"
    rounds = 1 if given.quick else given.rounds
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = float32_sprout(Path(folder))
        for name in given.workloads or WORKLOADS:
            print(f"ablation: {name}", file=sys.stderr, flush=True)
            found[name] = measure(name, [v for v in VARIANTS if not v.only or name in v.only], model, rounds)
        nothing = unshared(model, rounds)
    Console(width=None if sys.stdout.isatty() else 200).print(table(found))
    overhead = statistics.median(nothing["with"]) / statistics.median(nothing["without"]) - 1
    print(f"16 prompts that share nothing: the radix tree takes {overhead:+.1%} of CPU time")
    if given.output:
        figures = {"workloads": found, "nothing_shared_cpu_s": nothing}
        given.output.write_text(json.dumps(origin() | figures, indent=1) + "\n")
    if given.figure:
        figure(found, given.figure)
    return 0
