"""The one thread with the one event loop on which all requests to endpoints run."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from graftlm.core.serving.loop_inbox import LoopInbox, inbox_of

T = TypeVar("T")

log = logging.getLogger("graftlm.remote")

_lock = threading.Lock()
_inbox: LoopInbox | None = None
_thread: threading.Thread | None = None


def is_here() -> bool:
    """Return True if the caller is on the loop's thread, where waiting for an answer would deadlock."""
    return threading.current_thread() is _thread


def post(function: Callable[[], object]) -> None:
    """Schedule a function on the loop. One wake-up serves all functions that are posted before the loop runs."""
    (_inbox or _begin()).post(function)


def run(coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    """Run a coroutine on the loop. Cancelling the future cancels the coroutine, which closes its connection."""
    future: Future[T] = Future()
    post(partial(_start, coroutine, future))
    return future


def _begin() -> LoopInbox:
    """Start the thread unless it runs."""
    global _inbox, _thread
    with _lock:
        if _inbox is None:
            loop = asyncio.new_event_loop()
            _thread = threading.Thread(target=_serve, args=(loop,), name="graftlm remote", daemon=True)
            _thread.start()
            _inbox = inbox_of(loop)
        return _inbox


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop forever; restart it after SystemExit and KeyboardInterrupt of one caller's code.

    asyncio has by then passed the exception to its task, and so to its waiters.
    """
    while True:
        try:
            loop.run_forever()
        except BaseException:
            log.exception("a caller's code raised on the loop of endpoints")


def _start(coroutine: Coroutine[Any, Any, T], future: Future[T]) -> None:
    task = asyncio.get_running_loop().create_task(coroutine)
    task.add_done_callback(partial(_settle, future))
    future.add_done_callback(lambda done: post(task.cancel) if done.cancelled() else None)


def _settle(future: Future[T], task: asyncio.Task[T]) -> None:
    with suppress(InvalidStateError):  # the waiter has cancelled the future
        if task.cancelled():
            future.cancel()
        elif (error := task.exception()) is not None:
            future.set_exception(error)
        else:
            future.set_result(task.result())


def _forget() -> None:
    """Reset the loop in a forked child process, where its thread does not run."""
    global _inbox, _lock, _thread
    _inbox, _lock, _thread = None, threading.Lock(), None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
