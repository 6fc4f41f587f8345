"""Callers that were answered together are waited for, and nobody else."""

from __future__ import annotations

import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from graftlm.core.caller_waves import LONGEST_S, MIN_CALLERS, CallerWaves
from graftlm.core.config import SamplingParams
from graftlm.core.request import Request, Submission
from graftlm.testing import ScriptedModel


def wave(num_callers: int, at_s: float = 0.0) -> CallerWaves:
    """Callers that all asked, and were all answered at `at_s`."""
    waves = CallerWaves()
    for _ in range(num_callers):
        waves.asked()
    for _ in range(num_callers):
        waves.answered(at_s)
    return waves


def test_the_first_callers_are_not_waited_for() -> None:
    waves = CallerWaves()
    for _ in range(8):
        waves.asked()
    assert not waves.gathering(1.0)


def test_callers_answered_together_are_waited_for_until_all_are_back() -> None:
    waves = wave(8, at_s=1.0)
    for _ in range(8):
        assert waves.gathering(1.001)
        waves.asked()
    assert not waves.gathering(1.001)


def test_a_wave_is_as_old_as_its_first_answer() -> None:
    waves = wave(4, at_s=1.0)
    waves.asked()
    waves.answered(1.02)
    assert waves.since_s == 1.0
    waves.asked()
    waves.answered(1.03 + LONGEST_S)
    assert waves.since_s == 1.03 + LONGEST_S


def test_callers_are_not_waited_for_longer_than_the_limit_after_the_last_heard_of_its_answer() -> None:
    waves = wave(8, at_s=1.0)
    waves.told(4, 1.0)
    waves.told(4, 1.03)
    assert waves.gathering(1.0 + LONGEST_S)
    assert not waves.gathering(1.03 + LONGEST_S)


def test_few_callers_are_not_waited_for() -> None:
    assert not wave(MIN_CALLERS - 1).gathering(0.0)


def test_nobody_waits_while_more_requests_run_than_callers_were_answered() -> None:
    waves = CallerWaves()
    for _ in range(20):
        waves.asked()
    for _ in range(8):
        waves.answered(0.0)
    assert not waves.gathering(0.0)


def test_a_wave_is_answered_in_two_parts() -> None:
    assert [wave(num).part for num in (4, 9, 64)] == [MIN_CALLERS, 5, 32]


def test_callers_are_awake_between_hearing_of_their_answers_and_asking_again() -> None:
    waves = wave(6, at_s=1.0)
    waves.told(4, 1.001)
    waves.asked()
    assert waves.num_awake == 3
    waves.told(2, 1.03)
    assert waves.num_awake == 5


def test_threads_that_ask_again_and_again_run_as_whole_batches() -> None:
    model, num_threads = ScriptedModel(lambda prompt: "ok"), 16
    barrier = threading.Barrier(num_threads)
    with model.runtime() as runtime, ThreadPoolExecutor(num_threads) as pool:
        runtime.load()

        def caller(number: int) -> list[str]:
            barrier.wait()
            return [runtime.generate(f"{number} {i}", max_tokens=4).text for i in range(3)]

        answers = list(pool.map(caller, range(num_threads)))
        assert answers == [["ok"] * 3] * num_threads
        assert runtime._thread._waves._num_open == 0


def test_an_engine_that_gathers_computes_prompts_and_lets_nobody_decode_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[Submission] = []

    def gather(engine: Any) -> list[int]:
        engine.add(held)
        while engine.gather(-math.inf):
            pass
        return [one.completion_tokens for one in engine.stats().open]

    with ScriptedModel(lambda prompt: "okay").runtime(max_step_tokens=16) as runtime:
        runtime.load()
        monkeypatch.setattr(runtime._thread, "add", held.extend)
        params = SamplingParams(max_tokens=4)
        futures = runtime.submit_many([Request("one " * 9, params), Request("two " * 5, params)])
        assert runtime._thread.call(gather) == [1, 1]
        assert [future.result().text for future in futures] == ["okay", "okay"]


@pytest.mark.parametrize("times", [1, 3])
def test_callers_of_one_step_are_answered_a_few_at_a_time_and_all_of_them(times: int) -> None:
    num_threads = 40
    ready = threading.Barrier(num_threads)

    def caller(number: int) -> list[str]:
        ready.wait()
        return [runtime.generate(f"{number} {i}", max_tokens=4).text for i in range(times)]

    with ScriptedModel(lambda prompt: "ok").runtime(max_step_tokens=4096) as runtime:
        runtime.load()
        with ThreadPoolExecutor(num_threads) as pool:
            assert list(pool.map(caller, range(num_threads))) == [["ok"] * times] * num_threads
        assert not runtime._thread._answers


def test_answers_that_wait_for_their_turn_are_given_when_the_runtime_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    with ScriptedModel(lambda prompt: "ok").runtime() as runtime:
        runtime.load()
        monkeypatch.setattr(runtime._thread, "_tell", lambda limit: None)  # their turn never comes
        futures = [runtime.submit(Request(f"{i}", SamplingParams(max_tokens=2))) for i in range(6)]
        while len(runtime._thread._answers) < 6:
            time.sleep(0.001)
        assert not any(future.done() for future in futures)
        monkeypatch.undo()
        runtime.close()
        assert {future.result().text for future in futures} == {"ok"}
