"""Callers that were answered together are waited for, and nobody else."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from graftlm.core.caller_waves import LONGEST_S, MIN_CALLERS, QUIET_S, CallerWaves
from graftlm.core.config import SamplingParams
from graftlm.core.request import Request
from graftlm.testing import ScriptedModel


def wave(num_callers: int, at_s: float = 0.0) -> CallerWaves:
    """Callers that all asked and were all answered at `at_s`."""
    waves = CallerWaves()
    for _ in range(num_callers):
        waves.asked(at_s)
    for _ in range(num_callers):
        waves.answered(at_s)
    return waves


def test_the_first_callers_are_not_waited_for() -> None:
    waves = CallerWaves()
    for _ in range(8):
        waves.asked(1.0)
    assert waves.pause_s(1.0) <= 0


def test_callers_answered_together_are_waited_for_until_all_are_back() -> None:
    waves = wave(8, at_s=1.0)
    for i in range(8):
        assert waves.pause_s(1.001) == pytest.approx(QUIET_S - 0.001 if i == 0 else QUIET_S)
        waves.asked(1.001)
    assert waves.pause_s(1.001) <= 0


def test_a_wave_is_as_old_as_its_first_answer() -> None:
    waves = wave(4, at_s=1.0)
    waves.asked(1.01)
    waves.answered(1.02)
    assert waves.since_s == 1.0
    waves.asked(1.03)
    waves.answered(1.03 + LONGEST_S)
    assert waves.since_s == 1.03 + LONGEST_S


def test_the_wait_ends_when_nobody_comes_for_a_while() -> None:
    waves = wave(8, at_s=1.0)
    waves.asked(1.001)
    assert waves.pause_s(1.001 + QUIET_S) <= 0


def test_callers_that_trickle_in_are_not_waited_for_longer_than_the_limit() -> None:
    waves = wave(64, at_s=0.0)
    now = 0.0
    while waves.pause_s(now) > 0:
        now += QUIET_S / 2
        waves.asked(now)
    assert now == pytest.approx(LONGEST_S, abs=QUIET_S)


def test_few_callers_are_not_waited_for() -> None:
    assert wave(MIN_CALLERS - 1).pause_s(0.0) <= 0


def test_nobody_waits_while_more_requests_run_than_callers_were_answered() -> None:
    waves = CallerWaves()
    for _ in range(20):
        waves.asked(0.0)
    for _ in range(8):
        waves.answered(0.0)
    assert waves.pause_s(0.0) <= 0


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


def test_while_callers_are_awaited_prompts_are_computed_and_nobody_decodes_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    all_back = threading.Event()
    with ScriptedModel(lambda prompt: "okay").runtime(max_step_tokens=64) as runtime:
        runtime.load()
        monkeypatch.setattr(runtime._thread._waves, "pause_s", lambda now: 0.0 if all_back.is_set() else 60.0)
        early, late = (runtime.stream(prompt * 8, max_tokens=4) for prompt in ("one", "two"))
        next(early), next(late)
        assert [one.completion_tokens for one in runtime.stats().open] == [1, 1]
        all_back.set()
        runtime._thread.wake()
        assert [len(list(early)), len(list(late))] == [3, 3]


def test_callers_are_awake_between_hearing_of_their_answers_and_asking_again() -> None:
    waves = wave(6, at_s=1.0)
    waves.told(4, 1.001)
    waves.asked(1.002)
    assert waves.num_awake == 3
    waves.told(2, 1.03)
    assert waves.num_awake == 5
    assert waves.pause_s(1.031) == pytest.approx(0.001)  # silence counts from the last that heard of it
    waves.worked(1.04)
    assert waves.pause_s(1.041) == pytest.approx(0.001)  # and from the engine's last step


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
