"""GraftAdapter beside ChatAdapter: its cost on an instant engine, and the share of a hot model's replies that parse."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Sequence
from typing import Literal

import dspy
from dspy import lm15

from bench.frameworks._dspy import THREADS, loaded, quiet
from bench.harness import Options, Row, paired, rate_row, timed
from graftlm import Runtime
from graftlm.adapters.dspy import GraftAdapter, GraftLM


class Ticket(dspy.Signature):
    """Read the ticket."""

    ticket: str = dspy.InputField()
    label: Literal["bug", "feature", "question"] = dspy.OutputField()
    urgent: bool = dspy.OutputField()
    summary: str = dspy.OutputField()


def run(options: Options) -> Sequence[Row]:
    with loaded(options) as (runtime, _, _):
        return [scaffold_row(options, runtime), *adapter_rows(options, runtime)]


def adapter_rows(options: Options, runtime: Runtime) -> list[Row]:
    """Measure the adapter's extra time beside ChatAdapter on an instant engine, and calls per second on 16 threads."""
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
    """Return the row of a hot model's replies that parse."""
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
