"""DSPy on GraftLM, on a plain `generate` engine and on `transformers serve`: same weights, same machine, one run.

An evaluation of 150 examples and an optimiser run of over 300 calls are long enough to be run once each, after a short
one that warms everything up; all of it takes some seven minutes on two cores, and says how far it is.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import random
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import dspy
from dspy import lm15
from dspy.utils.callback import BaseCallback

from bench import demo_inputs
from bench.frameworks._serve import served
from bench.harness import Options, Row, Timing, paired, rate_row, timed
from graftlm import Runtime
from graftlm.adapters.dspy import GraftAdapter, GraftLM
from graftlm.demo.pipelines.dspy import TransformersEngine

THREADS = 16


class Answer(dspy.Signature):
    """Answer from the passage."""

    passage: str = dspy.InputField()
    question: str = dspy.InputField()
    answer: str = dspy.OutputField()


class Ticket(dspy.Signature):
    """Read the ticket."""

    ticket: str = dspy.InputField()
    label: Literal["bug", "feature", "question"] = dspy.OutputField()
    urgent: bool = dspy.OutputField()
    summary: str = dspy.OutputField()


def examples(number: int) -> list[dspy.Example]:
    items: list[dict[str, Any]] = []
    seed = 0
    while len(items) < number:
        items += demo_inputs.questions(random.Random(seed))
        seed += 1
    return [dspy.Example(**item).with_inputs("passage", "question") for item in items[:number]]


def right(example: dspy.Example, made: Any, trace: Any = None) -> bool:
    return bool(str(made.answer).strip() == example.answer)


def program() -> dspy.Predict:
    """A predictor with four demos."""
    predict = dspy.Predict(Answer)
    predict.demos = examples(124)[120:]
    return predict


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without DSPy's progress lines and what it says of truncated answers."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def evaluation(lm: dspy.LM, adapter: dspy.Adapter, devset: list[dspy.Example]) -> float:
    with dspy.context(lm=lm, adapter=adapter), quiet():
        return float(dspy.Evaluate(devset=devset, metric=right, num_threads=THREADS)(program()).score)


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


def adapter_rows(options: Options, runtime: Runtime) -> list[Row]:
    """What the adapter adds to ChatAdapter on the way to an instant engine, and calls per second on 16 threads."""
    number = options.choose(200, 1000)
    instant = _Instant(runtime)
    ours, theirs = [], []
    for _ in range(5):
        theirs.append(instant.milliseconds(dspy.ChatAdapter(), number))
        ours.append(instant.milliseconds(GraftAdapter(), number))
    added = statistics.median(a - b for a, b in zip(ours, theirs, strict=True))
    rows = [
        Row("dspy", "GraftAdapter above ChatAdapter, a call", added, "ms", floor=0.2, at_most=True,
            shape={"chat_adapter_ms": statistics.median(theirs)}),
    ]  # fmt: skip
    times = paired(
        {
            "ours": lambda: instant.threaded(GraftAdapter(), number),
            "stock": lambda: instant.threaded(dspy.ChatAdapter(), number),
        },
        options.repeats,
    )
    rows.append(
        rate_row("dspy", "16 threads, instant engine", "calls/s", number, times["ours"], times["stock"], floor=0.95)
    )
    return rows


class _Instant:
    """GraftLM whose engine answers at once, so that what is left is the adapters' own time."""

    REPLY = "[[ ## label ## ]]\nbug\n\n[[ ## urgent ## ]]\nTrue\n\n[[ ## summary ## ]]\ns\n\n[[ ## completed ## ]]\n"

    def __init__(self, runtime: Runtime) -> None:
        self.lm = GraftLM(runtime=runtime, cache=False, temperature=0)
        self.lm.engine.complete = self._complete

    def _complete(self, request: lm15.Request) -> lm15.Response:
        usage = lm15.Usage(input_tokens=1, output_tokens=1)
        return lm15.Response(None, request.model, lm15.Message.assistant(self.REPLY), "stop", usage)

    def milliseconds(self, adapter: dspy.Adapter, number: int) -> float:
        predict = dspy.Predict(Ticket)
        with dspy.context(lm=self.lm, adapter=adapter):
            predict(ticket="warm")
            return timed(lambda: [predict(ticket="a ticket") for _ in range(number)]) / number * 1e3

    def threaded(self, adapter: dspy.Adapter, number: int) -> None:
        predict = dspy.Predict(Ticket)

        def work() -> None:
            with dspy.context(lm=self.lm, adapter=adapter):
                for _ in range(number // THREADS):
                    predict(ticket="a ticket")

        threads = [threading.Thread(target=work) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def scaffold_row(options: Options, runtime: Runtime) -> Row:
    """Replies of a hot model that parse."""
    number = options.choose(24, 200)
    lm = GraftLM(runtime=runtime, cache=False, temperature=2.0, max_tokens=120)
    before = runtime.stats().requests
    with dspy.context(lm=lm, adapter=GraftAdapter(use_json_adapter_fallback=False)), quiet():
        jobs = [(dspy.Predict(Ticket), {"ticket": f"number {i}"}) for i in range(number)]
        answers = dspy.Parallel(num_threads=THREADS, disable_progress_bar=True)(jobs)
    parsed = sum(answer is not None for answer in answers)
    requests = runtime.stats().requests - before
    return Row("dspy", f"replies parsed of {number}, at temperature 2", parsed, "replies", floor=number,
               shape={"engine_requests": requests})  # fmt: skip


def say(what: str) -> None:
    print(f"dspy: {what}", file=sys.stderr, flush=True)


def evaluations(options: Options, runtime: Runtime, lm: dspy.LM, plain: dspy.LM, endpoint: dspy.LM | None) -> list[Row]:
    """Evaluate with four demos on 16 threads, on every engine."""
    chat = dspy.ChatAdapter(use_json_adapter_fallback=False)
    few, devset = examples(8), examples(options.choose(8, 150))
    programs: dict[str, tuple[dspy.LM, dspy.Adapter]] = {
        "plain": (plain, chat),
        "ours": (lm, chat),
        "typed": (lm, GraftAdapter()),
    }
    if endpoint is not None:
        programs["serve"] = (endpoint, chat)
    times: dict[str, Timing] = {}
    scores: dict[str, float] = {}
    for name, (model, adapter) in programs.items():
        evaluation(model, adapter, few)
        runtime.clear_cache()
        started = time.perf_counter()
        scores[name] = evaluation(model, adapter, devset)
        times[name] = Timing((time.perf_counter() - started,))
        say(f"{len(devset)} examples, {name}: {times[name].median:.1f} s, {scores[name]:.1f} % right")
    what = f"Evaluate, {len(devset)} examples, 4 demos, 16 threads"
    number, shape = len(devset), {"percent_right": scores}
    rows = [
        _rate(f"{what}, against generate", number, times["ours"], times["plain"]),
        _rate(f"{what}, GraftAdapter, against generate", number, times["typed"], times["plain"]),
    ]
    if "serve" in times:
        rows.append(_rate(f"{what}, against transformers serve", number, times["ours"], times["serve"]))
    return [replace(row, shape=shape) for row in rows]


def run(options: Options) -> Sequence[Row]:
    model = options.model or "sprout"
    with Runtime(model) as runtime, contextlib.ExitStack() as stack:
        folder = _folder(model)
        settings: dict[str, Any] = {"cache": False, "temperature": 0, "max_tokens": 48}
        lm = GraftLM(runtime=runtime, **settings)
        runtime.load()
        plain = dspy.LM("local/transformers", engine=TransformersEngine(folder), **settings)
        endpoint = None
        if importlib.util.find_spec("fastapi") and importlib.util.find_spec("uvicorn"):
            url = stack.enter_context(served(folder))
            endpoint = dspy.LM(f"openai/{folder}", api_base=url, api_key="none", **settings)
        rows = evaluations(options, runtime, lm, plain, endpoint)
        rows.append(search_row(options, runtime, lm, plain))
        rows.append(scaffold_row(options, runtime))
        rows += adapter_rows(options, runtime)
    return rows


def search_row(options: Options, runtime: Runtime, lm: dspy.LM, plain: dspy.LM) -> Row:
    trainset, candidates = examples(options.choose(4, 40)), options.choose(1, 5)
    calls: dict[str, int] = {}
    times: dict[str, Timing] = {}
    for name, model in (("ours", lm), ("plain", plain)):
        runtime.clear_cache()
        started = time.perf_counter()
        calls[name] = random_search(model, trainset, candidates)
        times[name] = Timing((time.perf_counter() - started,))
        say(f"BootstrapRS, {calls[name]} calls, {name}: {times[name].median:.1f} s")
    row = _rate(f"BootstrapRS, {calls['ours']} calls, against generate", calls["ours"], times["ours"], times["plain"])
    return replace(row, shape={"calls": calls})


def _rate(what: str, number: int, ours: Timing, theirs: Timing) -> Row:
    return rate_row("dspy", what, "calls/s", number, ours, theirs, floor=5)


def _folder(model: str) -> str:
    from graftlm.core.model import resolve

    return str(resolve(model))
