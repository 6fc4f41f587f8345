"""Worker threads for grammars: they compute masks and compile constraints. A fork starts threads of its own."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Generic, ParamSpec, TypeVar

from graftlm.core.interpreter_exit import EXIT_WAIT_S

P = ParamSpec("P")
T = TypeVar("T")


def lower_priority(nice: int) -> None:
    """Lower the priority of the calling thread, and of those that it starts later. Linux only."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)


class Task(Generic[T]):
    """A call that a worker makes, or the first thread that asks for its result before a worker has begun."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call: Callable[[], T] | None = call
        self._begun, self._done = threading.Lock(), threading.Lock()
        self._done.acquire()
        self._found: list[T] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        """Make the call, unless another thread does."""
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
        """Wait for the call. Returns or raises its result."""
        self.run()
        with self._done:
            if self._error is not None:
                raise self._error
            return self._found[0]


class Workers:
    """At most `count` daemon threads, started with the first task.

    At exit they finish the task that they run, for up to EXIT_WAIT_S seconds; queued tasks are dropped.
    """

    def __init__(self, count: int, name: str) -> None:
        self.count = count
        self.name = name
        self._nice = 0
        self.forget()
        _all.add(self)

    def submit(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Task[T]:
        """Have a thread call `function`."""
        if not self._threads:
            self._start()
        task = Task(lambda: function(*args, **kwargs))
        self._tasks.put(task)
        return task

    def _start(self) -> None:
        with self._starting:
            if not self._threads:
                threads = [
                    threading.Thread(
                        target=self._work, args=(self._tasks,), name=f"graftlm {self.name} {i}", daemon=True
                    )
                    for i in range(self.count)
                ]
                for thread in threads:
                    thread.start()
                self._threads.extend(threads)

    def step_back(self, nice: int) -> None:
        """Lower the priority of the threads: other threads of the process get the cores first. Linux only."""
        self._nice = nice
        self.submit(lambda: None)

    def _work(self, tasks: SimpleQueue[Task[Any]]) -> None:
        nice = 0
        while not self._exiting:
            task = tasks.get()
            if nice != self._nice:
                nice = self._nice
                lower_priority(nice)
            if self._exiting:
                return
            task.run()
            del task  # free its result before the next task comes

    def forget(self) -> None:
        """Start anew in a fork, whose parent has the threads and their tasks."""
        self._tasks: SimpleQueue[Task[Any]] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._starting = threading.Lock()
        self._exiting = False

    def stop(self) -> None:
        """Tell the threads to end after the task that they run."""
        self._exiting = True
        for _ in self._threads:
            self._tasks.put(Task(lambda: None))

    def join(self, limit: float) -> None:
        """Wait for the threads until time.monotonic() is `limit`."""
        for thread in self._threads:
            thread.join(max(0.0, limit - time.monotonic()))


_all: weakref.WeakSet[Workers] = weakref.WeakSet()
masks = Workers(max(1, min(8, (os.cpu_count() or 1) - 1)), "mask")
"""The threads that compute masks. The machine code that they run releases Python's lock."""


@atexit.register
def _end() -> None:
    """End the threads before the machine code that they run is freed."""
    workers, limit = list(_all), time.monotonic() + EXIT_WAIT_S
    for one in workers:
        one.stop()
    for one in workers:
        one.join(limit)


def _forget_all() -> None:
    for one in list(_all):
        one.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
