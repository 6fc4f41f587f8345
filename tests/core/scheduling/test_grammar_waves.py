"""Rows that could begin wait a little for those whose grammars are being compiled."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from graftlm.core.config import SamplingParams
from graftlm.core.constraint import compile_constraint
from graftlm.core.grammar.compile import Grammar
from graftlm.core.request import Chunk, Completion, Request, Submission
from graftlm.core.runtime import Runtime
from graftlm.core.scheduling import grammar_waves
from graftlm.core.scheduling.grammar_waves import LONGEST_S, QUIET_S, GrammarWaves
from graftlm.core.text.tokenizer import Tokenizer
from tests.models import byte_tokenizer, tiny_model


class Ended:
    """Listens to one request."""

    text = ""
    done = False

    def on_chunk(self, chunk: Chunk) -> None: ...

    def on_finish(self, completion: Completion) -> None:
        self.text, self.done = completion.text, True

    def on_error(self, error: BaseException) -> None:
        raise error


def submissions(sampling: SamplingParams, ends: list[Ended], waits: list[Future[Grammar]]) -> list[Submission]:
    """Requests with prompts of one token, each with the grammar that it waits for."""
    return [
        Submission(Request([7 + i], sampling), end, np.array([7 + i], np.int32), wait)
        for i, (end, wait) in enumerate(zip(ends, waits, strict=True))
    ]


def row(num_left: int = 1, *, constrained: bool = True, forced: int = 0, sampled: int = 0, in_flight: int = 0) -> Any:
    """A row of 20 prompt tokens, all but `num_left` of which are computed, and of tokens forced and sampled."""
    return SimpleNamespace(
        grammar=object() if constrained else None,
        num_prompt_tokens=20,
        num_generated=forced + sampled,
        output=SimpleNamespace(num_forced=forced),
        progress=SimpleNamespace(num_computed=20 - num_left, num_in_flight=in_flight),
    )


def scheduler(*running: Any, waiting: int = 0) -> Any:
    return SimpleNamespace(running=list(running), waiting=[row() for _ in range(waiting)])


def test_rows_wait_while_grammars_come_and_no_longer_than_that() -> None:
    waves, rows = GrammarWaves(), scheduler(row(), row())
    assert waves.hold(rows, 3, 0.0, 10.0) and waves.poll_s == pytest.approx(QUIET_S)
    second = 10.0 + 0.9 * QUIET_S
    assert waves.hold(rows, 2, second, second + 0.9 * QUIET_S) and waves.poll_s == pytest.approx(0.1 * QUIET_S)
    assert not waves.hold(rows, 2, second, second + 1.1 * QUIET_S) and waves.poll_s is None
    assert not waves.hold(scheduler(row(0, in_flight=1), row()), 2, 10.1, 10.1)


def test_rows_whose_forced_start_is_in_the_cache_wait_as_well() -> None:
    assert GrammarWaves().hold(scheduler(row(-4, forced=5), row()), 2, 10.0, 10.0)


def test_nobody_waits_longer_however_many_grammars_come() -> None:
    waves, now, num_compiling = GrammarWaves(), 10.0, 1000
    while waves.hold(scheduler(row()), num_compiling, now, now):
        now, num_compiling = now + QUIET_S / 2, num_compiling - 1
    assert now == pytest.approx(10.0 + LONGEST_S, abs=QUIET_S)


@pytest.mark.parametrize(
    "rows",
    [
        scheduler(row(), row(0, in_flight=1)),  # one decodes
        scheduler(row(), row(-2, forced=2, sampled=1)),
        scheduler(row(), row(9)),  # a prompt can run
        scheduler(row(), row(constrained=False)),
        scheduler(row(), waiting=1),
    ],
)
def test_nobody_waits_where_something_else_can_run(rows: Any) -> None:
    assert not GrammarWaves().hold(rows, 5, 10.0, 10.0)


def test_nobody_waits_for_no_grammar() -> None:
    assert not GrammarWaves().hold(scheduler(row()), 0, 10.0, 10.0)


@pytest.mark.parametrize("after_others", [False, True])
@pytest.mark.parametrize("num_ready", [1, 2])
def test_rows_begin_with_those_that_came_with_them(
    num_ready: int, after_others: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where some grammars are there before any prompt was looked at, and a step of rows that have ended runs."""
    for name in ("QUIET_S", "LONGEST_S"):
        monkeypatch.setattr(grammar_waves, name, 60.0)
    sampling = SamplingParams(regex="[ab]{3}", temperature=0)
    with Runtime(tiny_model("llama"), tokenizer=byte_tokenizer(), overlap=True) as runtime:
        grammar = compile_constraint(sampling, Tokenizer.from_hf(byte_tokenizer())).result()
        waits: list[Future[Grammar]] = [Future() for _ in range(3)]
        ends = [Ended() for _ in waits]
        given = submissions(sampling, ends, waits)
        for wait in waits[:num_ready]:
            wait.set_result(grammar)
        other = Ended()
        free = SamplingParams(max_tokens=9, temperature=0, stop_token_ids=tuple(range(256)))  # ends at once

        def steps(engine: Any) -> list[int]:
            if after_others:
                engine.add([Submission(Request([5], free), other, np.array([5], np.int32))])
                while not other.done:
                    engine.step()
                assert not engine.idle  # a step was launched before the last token was known
            before = engine.stats().steps
            engine.add(given)
            num_steps: list[int] = []
            for later in [None, *waits[num_ready:]]:
                if later is not None:
                    later.set_result(grammar)
                while engine.step() and engine.stats().steps == before:
                    pass
                assert (engine.poll_s is None) == (engine.stats().steps > before)
                num_steps.append(engine.stats().steps - before)
            num_running = engine.stats().running
            while not engine.idle:
                engine.step()
            return [*num_steps, num_running]

        found = runtime._thread.call(steps)
        assert found == [*[0] * (3 - num_ready), 1, 3]
        assert all(len(end.text) == 3 for end in ends)


def test_an_engine_is_woken_once_by_all_grammars_that_its_rows_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("QUIET_S", "LONGEST_S"):
        monkeypatch.setattr(grammar_waves, name, 60.0)
    sampling = SamplingParams(regex="[ab]{3}", temperature=0)
    with Runtime(tiny_model("llama"), tokenizer=byte_tokenizer()) as runtime:
        grammar = compile_constraint(sampling, Tokenizer.from_hf(byte_tokenizer())).result()
        waits: list[Future[Grammar]] = [Future() for _ in range(4)]
        ends = [Ended() for _ in waits]
        given = submissions(sampling, ends, waits)

        def steps(engine: Any) -> list[int]:
            num_wakes, found = 0, []

            def wake() -> None:
                nonlocal num_wakes
                num_wakes += 1

            engine.requests.wake = wake
            engine.add(given)
            while engine.step():
                pass
            for wait in waits:
                wait.set_result(grammar)
                found.append(num_wakes)
            while not engine.idle:
                engine.step()
            return found

        assert runtime._thread.call(steps) == [0, 0, 0, 1]
        assert all(len(end.text) == 3 for end in ends)
