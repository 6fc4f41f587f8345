"""Callers that were answered together are admitted in groups, and nobody else is waited for."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from graftlm.core.serving.caller_waves import GROUPS, LONGEST_S, QUIET_S, CallerWaves
from graftlm.testing import ScriptedModel


def wave(num_callers: int, at_s: float = 0.0) -> CallerWaves:
    """Callers that all asked and were all answered at `at_s`."""
    waves = CallerWaves()
    for _ in range(num_callers):
        waves.asked(at_s)
    waves.admitted()
    for _ in range(num_callers):
        waves.answered(at_s)
    return waves


def test_the_first_callers_are_not_waited_for() -> None:
    waves = CallerWaves()
    for _ in range(64):
        waves.asked(1.0)
        assert waves.hold_s(1.0) <= 0


def test_callers_answered_together_are_held_until_a_group_is_back() -> None:
    waves = wave(4 * GROUPS, at_s=1.0)
    for _ in range(4):
        assert waves.hold_s(1.001) > 0
        waves.asked(1.001)
    assert waves.hold_s(1.001) <= 0


def test_the_next_group_is_held_in_turn() -> None:
    waves = wave(4 * GROUPS, at_s=1.0)
    for _ in range(4):
        waves.asked(1.001)
    waves.admitted()
    assert waves.hold_s(1.001) == pytest.approx(QUIET_S)


def test_the_last_callers_are_held_for_nobody() -> None:
    waves = wave(4 * GROUPS, at_s=1.0)
    for _ in range(4 * GROUPS - 1):
        waves.asked(1.001)
    waves.admitted()
    waves.asked(1.001)
    assert waves.hold_s(1.001) <= 0


def test_a_hold_ends_when_nobody_comes_for_a_while() -> None:
    waves = wave(4 * GROUPS, at_s=1.0)
    waves.asked(1.001)
    assert waves.hold_s(1.001 + QUIET_S) <= 0


def test_callers_that_trickle_in_are_not_held_longer_than_the_limit() -> None:
    waves = wave(100 * GROUPS, at_s=0.0)
    now = 0.0
    while waves.hold_s(now) > 0:
        now += QUIET_S / 2
        waves.asked(now)
    assert now == pytest.approx(LONGEST_S, abs=QUIET_S)


def test_few_callers_are_not_held() -> None:
    waves = wave(GROUPS, at_s=1.0)
    waves.asked(1.0)
    assert waves.hold_s(1.0) <= 0


def test_callers_that_did_not_come_back_are_forgotten() -> None:
    waves = wave(4 * GROUPS, at_s=1.0)
    waves.asked(2.0)
    waves.admitted()
    waves.answered(2.0)
    waves.asked(2.0)
    assert waves.hold_s(2.0) <= 0


def test_threads_that_ask_again_and_again_run_as_batches() -> None:
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
