"""DSPy's Evaluate on GraftLM and on a plain `generate` engine: same weights, same machine, one run.

150 examples with four demos on sixteen threads are long enough to be run once on each engine, after a short run that
warms it up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import dspy

from bench.frameworks._dspy import THREADS, Answer, examples, loaded, once, plain_lm, quiet, rate, right
from bench.harness import Options, Row, Timing
from graftlm import Runtime
from graftlm.adapters.dspy import GraftAdapter

WHAT = "Evaluate, {} examples, 4 demos, 16 threads"
Engines = dict[str, tuple[dspy.LM, dspy.Adapter]]


def program() -> dspy.Predict:
    """Build a predictor with four demos."""
    predict = dspy.Predict(Answer)
    predict.demos = examples(124)[120:]
    return predict


def evaluation(lm: dspy.LM, adapter: dspy.Adapter, devset: list[dspy.Example]) -> float:
    with dspy.context(lm=lm, adapter=adapter), quiet():
        return float(dspy.Evaluate(devset=devset, metric=right, num_threads=THREADS)(program()).score)


def evaluations(options: Options, runtime: Runtime, engines: Engines) -> tuple[dict[str, Timing], dict[str, float]]:
    """Return the time of an evaluation on every engine, and the percentage of right answers."""
    few, devset = examples(8), examples(options.choose(8, 150))
    times: dict[str, Timing] = {}
    scores: dict[str, float] = {}
    for name, (model, adapter) in engines.items():
        evaluation(model, adapter, few)
        runtime.clear_cache()
        times[name], scores[name] = once(
            f"{len(devset)} examples, {name}", lambda m=model, a=adapter: evaluation(m, a, devset)
        )
    return times, scores


def run(options: Options) -> Sequence[Row]:
    chat = dspy.ChatAdapter(use_json_adapter_fallback=False)
    number = options.choose(8, 150)
    with loaded(options) as (runtime, lm, folder):
        engines: Engines = {"plain": (plain_lm(folder), chat), "ours": (lm, chat), "typed": (lm, GraftAdapter())}
        times, scores = evaluations(options, runtime, engines)
    what = WHAT.format(number)
    rows = [
        rate(f"{what}, against generate", number, times["ours"], times["plain"]),
        rate(f"{what}, GraftAdapter, against generate", number, times["typed"], times["plain"]),
    ]
    return [replace(row, shape={"percent_right": scores}) for row in rows]
