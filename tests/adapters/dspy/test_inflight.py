"""Equal calls are computed once, on the thread that came first."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from graftlm.adapters.dspy.inflight import InFlight


def held(calls: InFlight[str], outcome: Callable[[], str]) -> tuple[list[object], list[str]]:
    """What eight equal calls return or raise while the first of them computes, and who computed."""
    computed: list[str] = []
    gate = threading.Event()

    def compute() -> str:
        computed.append(threading.current_thread().name)
        gate.wait(120)
        return outcome()

    def ask(_: int) -> object:
        try:
            return calls.answer("key", compute)
        except BaseException as error:
            return error

    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, i) for i in range(8)]
        while len(calls) == 0 or len(calls._waiting["key"]) < 7:
            pass
        gate.set()
        return [one.result() for one in asked], computed


def test_equal_calls_are_computed_once() -> None:
    calls: InFlight[str] = InFlight()
    answers, computed = held(calls, lambda: "yes")
    assert answers == ["yes"] * 8
    assert len(computed) == 1 and len(calls) == 0


def test_an_error_is_raised_in_all_of_them_and_remembered_by_none() -> None:
    calls: InFlight[str] = InFlight()
    error = ValueError("no")

    def fail() -> str:
        raise error

    answers, computed = held(calls, fail)
    assert answers == [error] * 8 and len(computed) == 1
    assert calls.answer("key", lambda: "now") == "now"


def test_where_the_first_is_interrupted_another_computes() -> None:
    calls: InFlight[str] = InFlight()
    outcomes = iter([KeyboardInterrupt()])

    def interrupted_once() -> str:
        for error in outcomes:
            raise error
        return "yes"

    answers, computed = held(calls, interrupted_once)
    assert sorted(map(str, answers)) == ["", *["yes"] * 7]
    assert len(computed) >= 2 and len(calls) == 0


def test_other_keys_do_not_wait() -> None:
    calls: InFlight[str] = InFlight()
    assert calls.answer("a", lambda: calls.answer("b", lambda: "inner")) == "inner"


async def test_equal_calls_of_tasks_are_computed_once() -> None:
    calls: InFlight[str] = InFlight()
    computed, gate = [], asyncio.Event()

    async def compute() -> str:
        computed.append(asyncio.current_task())
        await gate.wait()
        return "yes"

    tasks = [asyncio.create_task(calls.aanswer("key", compute)) for _ in range(4)]
    await asyncio.sleep(0)
    gate.set()
    assert await asyncio.gather(*tasks) == ["yes"] * 4
    assert computed == tasks[:1] and len(calls) == 0


async def test_where_the_first_task_is_cancelled_another_computes() -> None:
    calls: InFlight[str] = InFlight()
    computed, gate = [], asyncio.Event()

    async def compute() -> str:
        computed.append(asyncio.current_task())
        await gate.wait()
        return "yes"

    first, second, third = (asyncio.create_task(calls.aanswer("key", compute)) for _ in range(3))
    await asyncio.sleep(0)
    third.cancel()  # who only waits
    await asyncio.sleep(0)
    first.cancel()
    gate.set()
    assert await second == "yes"
    assert computed == [first, second] and first.cancelled() and third.cancelled()
    assert len(calls) == 0
