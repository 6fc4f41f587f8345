"""Background execution of appends to lazy model objects.

Each append is a task, which starts after the task of its base object. The first task on a base continues in the
base's thread, further ones get other threads: a chain keeps one thread, and branches of one base share a batch.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import Context, copy_context
from functools import cache
from typing import Any

_logger = logging.getLogger(__name__)
_following = threading.Lock()
MAX_THREADS = 256


class Task:
    """`append(base, item)` in the background. `before` is the unfinished task that creates `base`, or None."""

    def __init__(self, append: Callable[[Any, Any], Any], base: Any, item: Any, context: Context) -> None:
        self._append = append
        self._base = base
        self._item = item
        self._context = context
        self._made: Future[Any] = Future()
        self._followers: list[Task] | None = []
        self._read = False

    @classmethod
    def start(cls, append: Callable[[Any, Any], Any], base: Any, item: Any, before: Task | None) -> Task:
        """Start the task as soon as `base` exists, with the current context variables of the calling thread."""
        task = cls(append, base, item, copy_context())
        if before is None or not before._followed_by(task):
            _threads().submit(task._run)
        return task

    def result(self) -> Any:
        """Wait for the new object. Raises the error of the append, or the error that prevented `base`."""
        self._read = True
        return self._made.result()

    def _followed_by(self, task: Task) -> bool:
        """Schedule `task` after this one; return False if this one has ended."""
        with _following:
            if self._followers is None:
                return False
            self._followers.append(task)
            return True

    def _run(self) -> None:
        task: Task | None = self
        while task is not None:
            task._make()
            with _following:
                followers, task._followers = task._followers or [], None
            for other in followers[1:]:
                _threads().submit(other._run)
            task = followers[0] if followers else None

    def _make(self) -> None:
        try:
            made = self._context.run(self._append, self._base, self._item)
        except BaseException as error:
            self._made.set_exception(error)
        else:
            self._made.set_result(made)
        self._base = self._item = None

    def __del__(self) -> None:
        if not self._read and self._made.done() and (error := self._made.exception()) is not None:
            _logger.warning("what was appended to a lazy model failed, and nobody read it: %r", error)


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="graftlm-guidance")
