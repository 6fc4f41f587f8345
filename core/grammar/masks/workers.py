"""The threads that compute masks, outside of Python's lock; a fork gets threads of its own."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


_pool: ThreadPoolExecutor
_tasks: deque[Task[Any]]
_lock: threading.Lock
_num_begun: int
"""Threads that take tasks now, or will as soon as they run."""


class Task(Generic[T]):
    """A call that a worker makes, or whoever asks for its result before one has begun."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call: Callable[[], T] | None = call
        self._begun, self._done = threading.Lock(), threading.Lock()
        self._done.acquire()
        self._found: T | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Make the call, unless somebody else does."""
        call = self._call
        if call is None or not self._begun.acquire(blocking=False):
            return
        try:
            self._found = call()
        except BaseException as error:
            self._error = error
        finally:
            self._call = None
            self._done.release()

    def result(self) -> T:
        """What the call returned or raised; waits for it."""
        self.run()
        with self._done:
            if self._error is not None:
                raise self._error
            return self._found  # type: ignore[return-value]


def count() -> int:
    """How many threads there are at most."""
    return max(1, min(8, (os.cpu_count() or 1) - 1))


def submit(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Task[T]:
    """Have a thread call `function`. Those that are at work take it; only where some are not, one is begun."""
    global _num_begun
    task = Task(lambda: function(*args, **kwargs))
    with _lock:
        _tasks.append(task)
        is_new = _num_begun < count()
        _num_begun += is_new
    if is_new:
        _pool.submit(_work)
    return task


def _work() -> None:
    """Run tasks until there is none."""
    global _num_begun
    while True:
        with _lock:
            if not _tasks:
                _num_begun -= 1
                return
            task = _tasks.popleft()
        task.run()


def _start() -> None:
    global _pool, _tasks, _lock, _num_begun
    _pool = ThreadPoolExecutor(count(), thread_name_prefix="graftlm mask")
    _tasks, _lock, _num_begun = deque(), threading.Lock(), 0


_start()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start)
