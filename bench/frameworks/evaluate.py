"""DSPy's Evaluate over 40 examples on 16 threads: batch sizes and computed tokens of its calls."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import dspy

from bench.frameworks._prompts import observed
from bench.harness import Options, Row
from graftlm import Runtime
from graftlm.adapters.dspy import GraftLM

NAMES = ("Mara", "Tobin", "Ilsa", "Rowan", "Petra", "Anselm", "Corin", "Delia")
CITIES = ("Velm", "Oskar", "Trent", "Lund", "Bray")


class Answer(dspy.Signature):
    """Answer from the passage."""

    passage: str = dspy.InputField()
    question: str = dspy.InputField()
    answer: str = dspy.OutputField()


def examples() -> list[dspy.Example]:
    """Five questions about each of eight passages."""
    made = []
    for i, name in enumerate(NAMES):
        facts = " ".join(f"{other} lives in {CITIES[(i + j) % 5]}." for j, other in enumerate(NAMES))
        for other in NAMES[:5]:
            question = f"Where does {other} live?"
            made.append(dspy.Example(passage=f"{name} writes: {facts}", question=question, answer=""))
    return [example.with_inputs("passage", "question") for example in made]


def run(options: Options) -> Sequence[Row]:
    logging.getLogger("dspy").setLevel(logging.ERROR)
    devset = examples()
    with Runtime(options.model or "sprout") as runtime, observed(runtime) as prompts:
        lm = GraftLM(runtime=runtime, cache=False, temperature=0, max_tokens=48)
        evaluate = dspy.Evaluate(devset=devset, metric=lambda example, made: True, num_threads=16)
        runtime.load()
        with dspy.context(lm=lm):
            evaluate(dspy.Predict(Answer))
        stats = runtime.stats()
    return [
        Row(
            "evaluate",
            f"largest batch, {len(devset)} examples, 16 threads",
            stats.largest_batch,
            "sequences",
            floor=12,
        ),
        Row(
            "evaluate",
            "prompt tokens computed, against unique prefix tokens",
            stats.computed_tokens,
            "tokens",
            baseline=prompts.num_unique,
            ratio=stats.computed_tokens / prompts.num_unique,
            floor=1.05,
            at_most=True,
            shape={"prompt_tokens": stats.prompt_tokens, "calls": stats.requests},
        ),
    ]
