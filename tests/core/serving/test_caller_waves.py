"""Callers that were answered together are waited for, and nobody else."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from graftlm.core.serving.caller_waves import LONGEST_S, MIN_CALLERS, QUIET_S, CallerWaves
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
