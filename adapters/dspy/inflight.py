"""Identical deterministic requests, computed once while the first of them is on its way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")


class InFlight(Generic[T]):
    """Shares the futures of equal keys until they are done; nothing is remembered after that.

    DSPy submits stragglers of an evaluation a second time after two minutes: the copy then waits for the first.
    The computation is cancelled when its last waiter has cancelled.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[Hashable, tuple[Future[T], list[Future[T]]]] = {}

    def submit(self, key: Hashable, start: Callable[[], Future[T]]) -> Future[T]:
        """Return a future of the answer to `key`, whose computation `start` begins unless one is on its way."""
        waiter: Future[T] = Future()
        with self._lock:
            known = self._entries.get(key)
            if known is not None:
                known[1].append(waiter)
            else:
                self._entries[key] = (work := start(), [waiter])
        waiter.add_done_callback(lambda one: self._leave(key, one))
        if known is None:
            work.add_done_callback(lambda done: self._finish(key, done))
        return waiter

    def __len__(self) -> int:
        return len(self._entries)

    def _leave(self, key: Hashable, waiter: Future[T]) -> None:
        if not waiter.cancelled():
            return
        with self._lock:
            work, waiters = self._entries.get(key, (None, []))
            if waiter in waiters:
                waiters.remove(waiter)
            if work is None or waiters:
                return
            del self._entries[key]
        work.cancel()

    def _finish(self, key: Hashable, work: Future[T]) -> None:
        with self._lock:
            # the last waiter may have left and a new computation of the same key begun
            known = self._entries.get(key)
            if known is None or known[0] is not work:
                return
            del self._entries[key]
        for waiter in known[1]:
            if not waiter.set_running_or_notify_cancel():
                continue
            if work.cancelled():
                waiter.set_exception(work_cancelled())
            elif (error := work.exception()) is not None:
                waiter.set_exception(error)
            else:
                waiter.set_result(work.result())


class InFlightCalls(Generic[T]):
    """Answers calls of equal keys by one computation, on the thread that came first. The others wait for it.

    If that thread is interrupted, one of the others computes instead. Nothing is remembered after the answer.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[Hashable, list[Future[T]]] = {}

    def answer(self, key: Hashable, compute: Callable[[], T]) -> T:
        while True:
            with self._lock:
                waiting = self._waiting.get(key)
                if waiting is None:
                    self._waiting[key] = []
                else:
                    waiting.append(waiter := Future[T]())
            if waiting is None:
                return self._lead(key, compute)
            with suppress(CancelledError):
                return waiter.result()

    def __len__(self) -> int:
        return len(self._waiting)

    def _lead(self, key: Hashable, compute: Callable[[], T]) -> T:
        try:
            result = compute()
        except BaseException as error:
            for waiter in self._end(key):
                if isinstance(error, Exception):
                    waiter.set_exception(error)
                else:
                    waiter.cancel()
            raise
        for waiter in self._end(key):
            waiter.set_result(result)
        return result

    def _end(self, key: Hashable) -> list[Future[T]]:
        with self._lock:
            return self._waiting.pop(key)


def work_cancelled() -> BaseException:
    from graftlm.core.errors import RequestCancelled

    return RequestCancelled("the runtime cancelled the request, for example because it was closed")
