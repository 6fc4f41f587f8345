from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import Future

import pytest

from graftlm.core.errors import EngineError
from graftlm.core.request import Completion, Request, Usage
from graftlm.core.serving.loop_batching import MAX_WAIT_S, complete


class Recorder:
    """Keeps what is handed over; answers when told to."""

    def __init__(self, *, ready: bool = True, error: Exception | None = None) -> None:
        self.groups: list[list[str]] = []
        self.futures: list[Future[Completion]] = []
        self.ready, self.error = ready, error

    def submit_many(self, requests: Sequence[Request]) -> list[Future[Completion]]:
        if self.error is not None:
            raise self.error
        self.groups.append([request.prompt for request in requests])
        futures: list[Future[Completion]] = [Future() for _ in requests]
        for request, future in zip(requests, futures, strict=True):
            if self.ready:
                future.set_result(Completion(request.prompt.upper(), [], "stop", Usage()))
        self.futures += futures
        return futures


async def test_calls_of_one_turn_become_one_hand_over_and_keep_their_order() -> None:
    runtime = Recorder()
    answers = await asyncio.gather(*(complete(runtime, Request(name)) for name in "abc"))
    assert runtime.groups == [["a", "b", "c"]]
    assert [answer.text for answer in answers] == ["A", "B", "C"]


async def test_calls_of_a_long_turn_are_handed_over_before_it_ends() -> None:
    async def work_and_call(name: str) -> str:
        until = time.thread_time() + MAX_WAIT_S
        while time.thread_time() < until:
            pass
        return (await complete(runtime, Request(name))).text

    runtime = Recorder()
    assert await asyncio.gather(*(work_and_call(name) for name in "abcde")) == list("ABCDE")
    assert runtime.groups == [["a", "b"], ["c", "d"], ["e"]]


async def test_calls_of_different_turns_and_runtimes_do_not_wait_for_each_other() -> None:
    first, second = Recorder(), Recorder()
    await asyncio.gather(complete(first, Request("a")), complete(second, Request("b")))
    await complete(first, Request("c"))
    assert (first.groups, second.groups) == ([["a"], ["c"]], [["b"]])


async def test_a_cancelled_call_cancels_its_request_and_no_other() -> None:
    runtime = Recorder(ready=False)
    tasks = [asyncio.create_task(complete(runtime, Request(name))) for name in "ab"]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    tasks[0].cancel()
    await asyncio.sleep(0)
    assert [future.cancelled() for future in runtime.futures] == [True, False]
    runtime.futures[1].set_result(Completion("B", [], "stop", Usage()))
    assert (await tasks[1]).text == "B"


async def test_a_call_cancelled_before_the_turn_ends_is_not_handed_over() -> None:
    runtime = Recorder()
    tasks = [asyncio.create_task(complete(runtime, Request(name))) for name in "ab"]
    asyncio.get_running_loop().call_soon(tasks[0].cancel)
    await asyncio.wait(tasks)
    assert tasks[0].cancelled() and runtime.groups in ([["b"]], [["a", "b"]])


async def test_a_refused_hand_over_is_told_to_every_caller() -> None:
    runtime = Recorder(error=EngineError("closed"))
    told = await asyncio.gather(*(complete(runtime, Request(name)) for name in "ab"), return_exceptions=True)
    assert [str(error) for error in told] == ["closed", "closed"]


def test_every_event_loop_has_its_own_turn() -> None:
    runtime = Recorder()
    for name in "ab":
        assert asyncio.run(complete(runtime, Request(name))).text == name.upper()
    assert runtime.groups == [["a"], ["b"]]


async def test_an_answers_error_reaches_its_caller() -> None:
    runtime = Recorder(ready=False)
    task = asyncio.create_task(complete(runtime, Request("a")))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    runtime.futures[0].set_exception(EngineError("a step failed"))
    with pytest.raises(EngineError, match="a step failed"):
        await task


class Panic(BaseException):
    """As a library in Rust raises."""


@pytest.mark.parametrize("error", [EngineError("bad"), Panic("bad")])
async def test_a_call_that_is_not_taken_used_to_end_the_others_of_its_turn(error: BaseException) -> None:
    class Picky(Recorder):
        def submit_many(self, requests: Sequence[Request]) -> list[Future[Completion]]:
            if any(request.prompt == "bad" for request in requests):
                raise error
            return super().submit_many(requests)

    runtime = Picky()
    calls = tuple(complete(runtime, Request(name)) for name in ("a", "bad", "c"))
    first, second, third = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(first, Completion) and isinstance(third, Completion)
    assert second is error
