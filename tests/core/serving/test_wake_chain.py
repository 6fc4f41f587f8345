"""Threads wake up one after the other, and none is forgotten."""

from __future__ import annotations

import threading

import pytest

from graftlm.core.serving import caller_waves
from graftlm.core.serving.caller_waves import WakeChain
from graftlm.core.serving.stream import Answer
from graftlm.testing import ScriptedModel


def held_locks(num: int) -> list[threading.Lock]:
    locks = [threading.Lock() for _ in range(num)]
    for lock in locks:
        lock.acquire()
    return locks


def awake(locks: list[threading.Lock]) -> list[bool]:
    return [not lock.locked() for lock in locks]


def test_each_thread_wakes_the_next() -> None:
    chain, locks = WakeChain(), held_locks(3)
    for lock in locks:
        chain.wake(lock)
    assert awake(locks) == [True, False, False]
    chain.awake()
    assert awake(locks) == [True, True, False]
    chain.awake()
    assert awake(locks) == [True, True, True]


def test_a_chain_that_has_ended_begins_anew() -> None:
    chain, locks = WakeChain(), held_locks(2)
    chain.wake(locks[0])
    chain.awake()
    chain.wake(locks[1])
    assert awake(locks) == [True, True]


def test_nobody_is_woken_during_a_pause() -> None:
    chain, locks = WakeChain(), held_locks(2)
    chain.wake(locks[0])
    chain.pause(True)
    chain.wake(locks[1])
    chain.awake()
    assert awake(locks) == [True, False]
    chain.pause(False)
    assert awake(locks) == [True, True]


def test_all_are_woken_when_a_thread_does_not_pass_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    chain, locks = WakeChain(), held_locks(3)
    for lock in locks:
        chain.wake(lock)
    assert chain.check()  # there is time left
    monkeypatch.setattr(caller_waves, "OVERDUE_S", 0.0)
    assert not chain.check()
    assert awake(locks) == [True, True, True]


def test_a_closed_chain_wakes_everyone_at_once() -> None:
    chain, locks = WakeChain(), held_locks(3)
    for lock in locks[:2]:
        chain.wake(lock)
    chain.close()
    chain.wake(locks[2])
    assert awake(locks) == [True, True, True]


def test_a_thread_that_was_interrupted_keeps_no_other_asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = WakeChain()
    first, second = Answer(chain=chain), Answer(chain=chain)

    class Interrupted:
        def acquire(self) -> None:
            raise KeyboardInterrupt

        def release(self) -> None:
            """Nobody waits."""

    monkeypatch.setattr(first, "_open", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        first.wait()
    first.on_error(RuntimeError("cancelled"))
    second.on_error(RuntimeError("done"))
    with pytest.raises(RuntimeError, match="done"):
        second.wait()


def test_threads_that_wait_hear_of_a_runtime_that_is_closed() -> None:
    model = ScriptedModel()
    model.hold()
    heard: list[BaseException] = []
    with model.runtime() as runtime:
        runtime.load()

        def ask(number: int) -> None:
            try:
                runtime.generate(f"{number}", max_tokens=4)
            except BaseException as error:
                heard.append(error)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        model.wait_for(8)
    for thread in threads:
        thread.join(120)
    assert len(heard) == 8
