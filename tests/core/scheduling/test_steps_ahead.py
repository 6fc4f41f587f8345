"""Decode steps that are run at once give the answers of single steps, and nobody waits for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from graftlm.core.runtime import Runtime
from graftlm.core.scheduling.scheduler import AHEAD
from graftlm.core.scheduling.steps_ahead import StepsAhead
from tests.models import byte_tokenizer, random_prompt, tiny_model

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}


@pytest.fixture(scope="module")
def rt() -> Iterator[Runtime]:
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "speculation": "off"}
    with Runtime(tiny_model("llama"), tokenizer=byte_tokenizer(), **options) as runtime:
        runtime.generate([random_prompt(9, seed=1)], **GREEDY)
        if engine_of(runtime).ahead is None:
            pytest.skip("no compiled steps on this CPU")
        yield runtime


def engine_of(runtime: Runtime) -> Any:
    return runtime._thread.engine


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many steps were run at once, run by run."""
    seen: list[int] = []
    run = StepsAhead.run

    def noted(ahead: StepsAhead, plan: Any, num_steps: int) -> NDArray[np.int64] | None:
        tokens = run(ahead, plan, num_steps)
        seen.append(1 if tokens is None else len(tokens))
        return tokens

    monkeypatch.setattr(StepsAhead, "run", noted)
    return seen


@pytest.fixture
def single(rt: Runtime, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The answers of single steps."""

    def answers(prompts: Any, **options: Any) -> Any:
        rt.clear_cache()
        with monkeypatch.context() as patch:
            patch.setattr(StepsAhead, "run", lambda ahead, plan, num_steps: None)
            return rt.generate(prompts, **options)

    return answers


def test_rows_of_any_length_get_the_answers_of_single_steps(rt: Runtime, single: Any, runs: list[int]) -> None:
    prompts = [random_prompt(5 + 13 * i, seed=i) for i in range(5)]
    for options in (GREEDY, {**GREEDY, "ignore_eos": False}, {**GREEDY, "max_tokens": 3}, {**GREEDY, "n": 2}):
        expected = single(prompts, **options)
        rt.clear_cache()
        runs.clear()
        got = rt.generate(prompts, **options)
        assert [(a.text, a.token_ids, a.finish_reason, a.usage) for a in got] == [
            (a.text, a.token_ids, a.finish_reason, a.usage) for a in expected
        ]
        assert max(runs) > 1 or options["max_tokens"] == 3
    engine_of(rt).check_integrity()


def test_where_nothing_is_drafted_steps_run_at_once_by_default(rt: Runtime, runs: list[int]) -> None:
    prompts = [random_prompt(5 + 13 * i, seed=i) for i in range(5)]
    expected = [answer.token_ids for answer in rt.generate(prompts, **GREEDY)]
    with Runtime(tiny_model("llama"), tokenizer=byte_tokenizer(), device="cpu", dtype="float32") as runtime:
        runtime.load()
        engine_of(runtime).drafter.look_up = lambda text, namespace, most: (0, [])
        runs.clear()
        assert [answer.token_ids for answer in runtime.generate(prompts, **GREEDY)] == expected
        stats = runtime.stats()
    assert max(runs) == AHEAD
    assert (stats.steps, stats.drafted_tokens) == (sum(runs), 0)


def test_a_stop_token_ends_a_row_where_it_ended_before(rt: Runtime, single: Any, runs: list[int]) -> None:
    prompts = [random_prompt(9, seed=1), random_prompt(30, seed=2)]
    stop = single(prompts, **GREEDY)[0].token_ids[11]
    options = {**GREEDY, "stop_token_ids": (stop,)}
    assert [a.token_ids for a in rt.generate(prompts, **options)] == [a.token_ids for a in single(prompts, **options)]
    assert max(runs) > 1


def test_no_more_steps_are_run_at_once_than_were_counted(rt: Runtime, runs: list[int]) -> None:
    rt.reset_stats()
    rt.generate([random_prompt(9, seed=3)], **{**GREEDY, "max_tokens": 100})
    assert rt.stats().steps == sum(runs) == 100
    assert 1 < max(runs) <= AHEAD


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.5}, {"stop": ("xyz",)}, {"regex": "[a-z]{40}"}, {"logprobs": True}, {"repetition_penalty": 1.2}],
)
def test_a_row_that_needs_the_host_is_run_step_by_step(rt: Runtime, runs: list[int], options: dict[str, Any]) -> None:
    rt.generate([random_prompt(9, seed=4)], **{**GREEDY, **options})
    assert max(runs) == 1


def test_a_stream_is_run_step_by_step(rt: Runtime, runs: list[int]) -> None:
    assert list(rt.stream(random_prompt(9, seed=5), **GREEDY))
    assert max(runs) == 1


def test_a_task_for_the_engine_interrupts_them(rt: Runtime) -> None:
    interrupted: list[int] = []
    engine = engine_of(rt)

    def task(engine: Any) -> None:
        interrupted.append(int(engine.ahead.runner.interrupt[0]))
        rt._thread.post(lambda engine: None)
        interrupted.append(int(engine.ahead.runner.interrupt[0]))

    rt._thread.call(task)
    assert interrupted == [0, 1]
    rt._thread.call(lambda engine: None)
    assert engine.ahead.runner.interrupt[0] == 0
