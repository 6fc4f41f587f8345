"""Batching of calls that start in the same turn of an event loop.

`asyncio.gather` over independent calls starts them one after the other within one turn of the
loop. Submitted individually, the engine would begin with the first; instead they wait for the end of the turn
and become one `submit_many`. If a framework works long before each call, as it splits or counts documents, the
engine would idle: calls wait for at most `MAX_WAIT_S` of the turn.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

from graftlm.core.request import Completion, Request
from graftlm.core.serving.loop_inbox import inbox_of


class Submits(Protocol):
    """The part of a Runtime that takes requests."""

    def submit_many(self, requests: Sequence[Request]) -> list[Future[Completion]]: ...


MAX_WAIT_S = 0.01
"""Processor time of the loop's thread after which a turn's calls are submitted before it ends. The clock of the thread
does not run while other threads and programs have the core, so that a busy machine does not break batches up."""

_Waiting = list[tuple[Request, "asyncio.Future[Completion]"]]


class _Turn(NamedTuple):
    """Calls that wait for the end of a turn. `since` is the arrival of the first, on the thread's CPU clock."""

    since: float
    waiting: _Waiting


_pending: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[int, _Turn]] = WeakKeyDictionary()


async def complete(runtime: Submits, request: Request) -> Completion:
    """Submit `request` together with all requests of this turn of the loop and wait for its answer.

    Cancelling the task frees the request's KV.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Completion] = loop.create_future()
    turns, now = _pending.setdefault(loop, {}), time.thread_time()
    if id(runtime) not in turns:
        turns[id(runtime)] = _Turn(now, [])
        loop.call_soon(_hand_over, loop, runtime, turns[id(runtime)])
    turn = turns[id(runtime)]
    turn.waiting.append((request, answer))
    if now - turn.since > MAX_WAIT_S:
        _hand_over(loop, runtime, turn)
    return await answer


def _hand_over(loop: asyncio.AbstractEventLoop, runtime: Submits, turn: _Turn) -> None:
    """Submit the waiting calls of `turn`; the next call begins another turn."""
    if _pending[loop].get(id(runtime)) is turn:
        del _pending[loop][id(runtime)]
        _submit(loop, runtime, [(request, answer) for request, answer in turn.waiting if not answer.done()])


def _submit(loop: asyncio.AbstractEventLoop, runtime: Submits, waiting: _Waiting) -> None:
    """Submit calls together; if that fails, individually, since one invalid call may be the cause."""
    try:
        futures = runtime.submit_many([request for request, _ in waiting])
    except BaseException as error:  # Rust code panics with one
        if len(waiting) > 1:
            for one in waiting:
                _submit(loop, runtime, [one])
        else:
            waiting[0][1].set_exception(error)
        return
    for (_, answer), future in zip(waiting, futures, strict=True):
        answer.add_done_callback(partial(_pass_cancel, future))
        future.add_done_callback(partial(_pass_result, loop, answer))


def _pass_cancel(future: Future[Completion], answer: asyncio.Future[Completion]) -> None:
    if answer.cancelled():
        future.cancel()


def _pass_result(
    loop: asyncio.AbstractEventLoop, answer: asyncio.Future[Completion], future: Future[Completion]
) -> None:
    with suppress(RuntimeError):  # the loop is closed
        inbox_of(loop).post(partial(_settle, answer, future))


def _settle(answer: asyncio.Future[Completion], future: Future[Completion]) -> None:
    if answer.done():
        return
    if future.cancelled():
        answer.cancel()
    elif (error := future.exception()) is not None:
        answer.set_exception(error)
    else:
        answer.set_result(future.result())


async def settled(futures: Sequence[Future[Completion]], *, until_error: bool) -> None:
    """Wait until all futures have ended or, with `until_error`, one has failed. The loop is woken once.

    Cancelling the task leaves the futures alone.
    """
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()
    ended = itertools.count(1)  # an atomic count over callbacks of several threads

    def end() -> None:
        if not over.done():
            over.set_result(None)

    def one(future: Future[Completion]) -> None:
        if next(ended) == len(futures) or (until_error and not future.cancelled() and future.exception() is not None):
            with suppress(RuntimeError):  # the loop is closed
                inbox_of(loop).post(end)

    for future in futures:
        future.add_done_callback(one)
    await over
