"""LoopInbox: functions that other threads post to an event loop, with one wake-up for many."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from weakref import WeakKeyDictionary, ref

log = logging.getLogger("graftlm.loop")

_inboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, LoopInbox] = WeakKeyDictionary()


def inbox_of(loop: asyncio.AbstractEventLoop) -> LoopInbox:
    """Return the inbox of an event loop, one per loop."""
    found = _inboxes.get(loop)
    return found if found is not None else _inboxes.setdefault(loop, LoopInbox(loop))


class LoopInbox:
    """A queue of functions that run on an event loop, in the order of posting.

    `loop.call_soon_threadsafe` writes to a socket and wakes the loop for each call; the inbox does that once for all
    functions that are posted before the loop runs. A function that raises is logged, and the rest run.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = ref(loop)
        self._due: deque[Callable[[], object]] = deque()
        self._woken = False

    def post(self, function: Callable[[], object]) -> None:
        """Run `function` soon. Any thread may call this; raises RuntimeError if the loop was closed."""
        # No lock: a thread that finds the loop woken has appended before the loop takes the queue.
        self._due.append(function)
        if not self._woken:
            self._wake()

    def _wake(self) -> None:
        loop = self._loop()
        if loop is None:
            raise RuntimeError("the event loop is gone")
        self._woken = True
        try:
            loop.call_soon_threadsafe(self._run)
        except BaseException:
            self._woken = False
            raise

    def _run(self) -> None:
        self._woken = False
        try:
            for _ in range(len(self._due)):
                try:
                    self._due.popleft()()
                except Exception:
                    log.exception("a call on an event loop failed")
        finally:
            if self._due and not self._woken:
                self._wake()  # functions posted by these calls, or left by a call that ended the loop
