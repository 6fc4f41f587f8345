"""Deduplication of identical deterministic requests while the first of them is computed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Hashable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")


class InFlight(Generic[T]):
    """A table of running computations: calls of equal keys share one result, computed by the first thread or task.

    DSPy submits stragglers of an evaluation a second time after two minutes: the copy then waits for the first. If the
    first is interrupted or cancelled, a waiting call computes instead. Results are not cached afterwards.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[Hashable, list[Future[T]]] = {}

    def answer(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Return the result of `compute`, called here or for an equal key elsewhere; raise its error."""
        while (waiter := self._join(key)) is not None:
            with suppress(CancelledError):
                return waiter.result()
        try:
            result = compute()
        except BaseException as error:
            self._fail(key, error)
            raise
        self._finish(key, result)
        return result

    async def aanswer(self, key: Hashable, compute: Callable[[], Awaitable[T]]) -> T:
        """Return the result as `answer` does, for a task. Shared with `answer` and with other event loops."""
        while (waiter := self._join(key)) is not None:
            try:
                return await asyncio.wrap_future(waiter)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
        try:
            result = await compute()
        except BaseException as error:
            self._fail(key, error)
            raise
        self._finish(key, result)
        return result

    def __len__(self) -> int:
        """Return the number of keys that are being computed."""
        return len(self._waiting)

    def _join(self, key: Hashable) -> Future[T] | None:
        """Return the future of the running computation of `key`; None for the first call, which must compute."""
        with self._lock:
            waiting = self._waiting.get(key)
            if waiting is None:
                self._waiting[key] = []
                return None
            waiting.append(waiter := Future[T]())
            return waiter

    def _finish(self, key: Hashable, result: T) -> None:
        for waiter in self._end(key):
            waiter.set_result(result)

    def _fail(self, key: Hashable, error: BaseException) -> None:
        """Pass an error on to the waiting calls; an interrupt or a cancellation only ends their wait."""
        for waiter in self._end(key):
            if isinstance(error, Exception):
                waiter.set_exception(error)
            else:
                waiter.set_exception(CancelledError())

    def _end(self, key: Hashable) -> list[Future[T]]:
        with self._lock:
            waiting = self._waiting.pop(key)
        return [waiter for waiter in waiting if waiter.set_running_or_notify_cancel()]
