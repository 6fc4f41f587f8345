"""Identical deterministic requests, computed once while the first of them is on its way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Hashable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")


class InFlight(Generic[T]):
    """Answers calls of equal keys by one computation: that of the thread or task that came first. The others wait.

    DSPy submits stragglers of an evaluation a second time after two minutes: the copy then waits for the first. If the
    first is interrupted or cancelled, one of the others computes instead. Nothing is remembered after the answer.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[Hashable, list[Future[T]]] = {}

    def answer(self, key: Hashable, compute: Callable[[], T]) -> T:
        """What `compute`, called here or for an equal key elsewhere, returns or raises."""
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
        """The same for a task. Calls of `answer` and of other event loops share with it."""
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
        """How many keys are being computed."""
        return len(self._waiting)

    def _join(self, key: Hashable) -> Future[T] | None:
        """Wait for who computes `key`; None for the first, who has to."""
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
        """Tell the others of an error; of an interrupt or a cancelled task they hear nothing but that it is over."""
        for waiter in self._end(key):
            if isinstance(error, Exception):
                waiter.set_exception(error)
            else:
                waiter.set_exception(CancelledError())

    def _end(self, key: Hashable) -> list[Future[T]]:
        with self._lock:
            waiting = self._waiting.pop(key)
        return [waiter for waiter in waiting if waiter.set_running_or_notify_cancel()]
