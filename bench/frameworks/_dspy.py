"""Shared parts of the DSPy cases: the task, and GraftLM beside a plain engine on the same weights."""

from __future__ import annotations

import contextlib
import io
import logging
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import dspy

from bench import demo_inputs
from bench.harness import Options, Row, Timing, rate_row
from graftlm import Runtime
from graftlm.ab.engines.frameworks import TransformersEngine
from graftlm.adapters.dspy import GraftLM
from graftlm.core.model.description import resolve

THREADS = 16
SETTINGS: dict[str, Any] = {"cache": False, "temperature": 0, "max_tokens": 48}


class Answer(dspy.Signature):
    """Answer from the passage."""

    passage: str = dspy.InputField()
    question: str = dspy.InputField()
    answer: str = dspy.OutputField()


def examples(number: int) -> list[dspy.Example]:
    items: list[dict[str, Any]] = []
    seed = 0
    while len(items) < number:
        items += demo_inputs.questions(random.Random(seed))
        seed += 1
    return [dspy.Example(**item).with_inputs("passage", "question") for item in items[:number]]


def right(example: dspy.Example, made: Any, trace: Any = None) -> bool:
    return bool(str(made.answer).strip() == example.answer)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress DSPy's progress lines and its warnings about truncated answers."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def say(what: str) -> None:
    print(f"dspy: {what}", file=sys.stderr, flush=True)


def once(name: str, run: Callable[[], Any]) -> tuple[Timing, Any]:
    """Return the time and the result of one run; stderr shows both."""
    started = time.perf_counter()
    result = run()
    seconds = time.perf_counter() - started
    say(f"{name}: {seconds:.1f} s, {result}")
    return Timing((seconds,)), result


def rate(what: str, number: int, ours: Timing, theirs: Timing) -> Row:
    return rate_row("dspy", what, "calls/s", number, ours, theirs, floor=5)


@contextlib.contextmanager
def loaded(options: Options) -> Iterator[tuple[Runtime, dspy.LM, str]]:
    """sprout, or the model of `--model`: a loaded runtime, GraftLM on it, and the folder of the weights."""
    model = options.model or "sprout"
    with Runtime(model) as runtime:
        lm = GraftLM(runtime=runtime, **SETTINGS)
        runtime.load()
        yield runtime, lm, str(resolve(model))


def plain_lm(folder: str) -> dspy.LM:
    """DSPy on an engine that calls `generate`, one prompt after the other."""
    return dspy.LM("local/transformers", engine=TransformersEngine(folder), **SETTINGS)
