"""An optimiser run of over 300 calls on GraftLM and on a plain `generate` engine, once each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import dspy
from dspy.utils.callback import BaseCallback

from bench.frameworks._dspy import THREADS, Answer, examples, loaded, once, plain_lm, quiet, rate, right
from bench.harness import Options, Row, Timing


class Calls(BaseCallback):
    """Counts calls of LMs."""

    def __init__(self) -> None:
        self.number = 0

    def on_lm_start(self, *_: Any, **__: Any) -> None:
        self.number += 1


def random_search(lm: dspy.LM, trainset: list[dspy.Example], candidates: int) -> int:
    """BootstrapFewShotWithRandomSearch; the number of calls it made."""
    calls = Calls()
    search = dspy.BootstrapFewShotWithRandomSearch(
        metric=right,
        max_bootstrapped_demos=2,
        max_labeled_demos=2,
        num_candidate_programs=candidates,
        num_threads=THREADS,
    )
    with dspy.context(lm=lm, callbacks=[calls]), quiet():
        search.compile(dspy.Predict(Answer), trainset=trainset)
    return calls.number


def run(options: Options) -> Sequence[Row]:
    trainset, candidates = examples(options.choose(4, 40)), options.choose(1, 5)
    calls: dict[str, int] = {}
    times: dict[str, Timing] = {}
    with loaded(options) as (runtime, lm, folder):
        for name, model in (("ours", lm), ("plain", plain_lm(folder))):
            runtime.clear_cache()
            times[name], calls[name] = once(
                f"BootstrapRS, calls, {name}", lambda m=model: random_search(m, trainset, candidates)
            )
    row = rate(f"BootstrapRS, {calls['ours']} calls, against generate", calls["ours"], times["ours"], times["plain"])
    return [replace(row, shape={"calls": calls})]
