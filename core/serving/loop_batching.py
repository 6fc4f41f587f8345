"""Batching of calls that start in the same turn of an event loop: they are submitted together.

`asyncio.gather` over calls that know nothing of each other starts them one after the other within one turn of the
loop. Submitting each on its own would let the engine begin with the first; here they wait for the end of the turn,
which costs no time, and become one `submit_many`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Protocol
from weakref import WeakKeyDictionary

from graftlm.core.request import Completion, Request
from graftlm.core.serving.loop_inbox import inbox_of


class Submits(Protocol):
    """What requests are submitted to: a Runtime."""

    def submit_many(self, requests: Sequence[Request]) -> list[Future[Completion]]: ...


_Waiting = list[tuple[Request, "asyncio.Future[Completion]"]]
_pending: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[int, _Waiting]] = WeakKeyDictionary()


async def complete(runtime: Submits, request: Request) -> Completion:
    """Submit `request` with all others of this turn of the loop and wait for its answer.

    Cancelling the task frees the request's KV.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Completion] = loop.create_future()
    groups = _pending.setdefault(loop, {})
    if id(runtime) not in groups:
        groups[id(runtime)] = []
        loop.call_soon(_hand_over, loop, runtime)
    groups[id(runtime)].append((request, answer))
    return await answer


def _hand_over(loop: asyncio.AbstractEventLoop, runtime: Submits) -> None:
    _submit(
        loop, runtime, [(request, answer) for request, answer in _pending[loop].pop(id(runtime)) if not answer.done()]
    )


def _submit(loop: asyncio.AbstractEventLoop, runtime: Submits, waiting: _Waiting) -> None:
    """Submit calls as one; if that fails, submit each alone, since one of them may be to blame."""
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
    with suppress(RuntimeError):  # the loop was closed: nobody waits any more
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
    """Wait until all have ended or, with `until_error`, one has failed. The loop is woken up once.

    Cancelling the task leaves the futures alone.
    """
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()
    ended = itertools.count(1)  # callbacks come from several threads, and this counts them one by one

    def end() -> None:
        if not over.done():
            over.set_result(None)

    def one(future: Future[Completion]) -> None:
        if next(ended) == len(futures) or (until_error and not future.cancelled() and future.exception() is not None):
            with suppress(RuntimeError):  # the loop was closed: nobody waits any more
                inbox_of(loop).post(end)

    for future in futures:
        future.add_done_callback(one)
    await over
