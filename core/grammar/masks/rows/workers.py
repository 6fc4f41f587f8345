"""The threads that compute masks, outside of Python's lock; a fork gets threads of its own."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, ParamSpec, TypeVar

from graftlm.core.interpreter_exit import EXIT_WAIT_S

P = ParamSpec("P")
T = TypeVar("T")


_tasks: SimpleQueue[Task[Any] | None]
_threads: list[threading.Thread]
_starting: threading.Lock


class Task(Generic[T]):
    """A call that a worker makes, or whoever asks for its result before one has begun."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call: Callable[[], T] | None = call
        self._begun, self._done = threading.Lock(), threading.Lock()
        self._done.acquire()
        self._found: list[T] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        """Make the call, unless somebody else does."""
        call = self._call
        if call is None or not self._begun.acquire(blocking=False):
            return
        try:
            self._found.append(call())
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
            return self._found[0]


def count() -> int:
    """How many threads there are at most."""
    return max(1, min(8, (os.cpu_count() or 1) - 1))


def submit(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Task[T]:
    """Have a thread call `function`."""
    if not _threads:
        _start()
    task = Task(lambda: function(*args, **kwargs))
    _tasks.put(task)
    return task


def _start() -> None:
    with _starting:
        if not _threads:
            threads = [
                threading.Thread(target=_work, args=(_tasks,), name=f"graftlm mask {i}", daemon=True)
                for i in range(count())
            ]
            for thread in threads:
                thread.start()
            _threads.extend(threads)


def _work(tasks: SimpleQueue[Task[Any] | None]) -> None:
    while (task := tasks.get()) is not None:
        task.run()
        del task  # what it found is freed before the next one comes


def _forget() -> None:
    """In a fork: the threads are the parent's, and so is what they were at."""
    global _tasks, _threads, _starting
    _tasks, _threads, _starting = SimpleQueue(), [], threading.Lock()


@atexit.register
def _end() -> None:
    """End before the machine code that the threads run."""
    for _ in _threads:
        _tasks.put(None)
    limit = time.monotonic() + EXIT_WAIT_S
    for thread in _threads:
        thread.join(max(0.0, limit - time.monotonic()))


_forget()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
