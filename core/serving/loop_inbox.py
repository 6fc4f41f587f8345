"""LoopInbox: calls that other threads hand to an event loop, many for one wake-up."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from weakref import WeakKeyDictionary, ref

log = logging.getLogger("graftlm.loop")

_inboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, LoopInbox] = WeakKeyDictionary()


def inbox_of(loop: asyncio.AbstractEventLoop) -> LoopInbox:
    """The one inbox of an event loop."""
    found = _inboxes.get(loop)
    return found if found is not None else _inboxes.setdefault(loop, LoopInbox(loop))


class LoopInbox:
    """Runs functions on an event loop, in the order in which they were posted.

    `loop.call_soon_threadsafe` writes to a socket and wakes the loop for each call; here that is done once for all that
    is posted until the loop looks. A function that raises is logged, and the others run.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = ref(loop)
        self._due: deque[Callable[[], object]] = deque()
        self._woken = False

    def post(self, function: Callable[[], object]) -> None:
        """Run `function` soon. Any thread may call this; raises RuntimeError if the loop was closed."""
        # No lock: whoever finds the loop woken has appended before the loop takes what is due.
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
                self._wake()  # what was posted by these calls, or is left by one that ended the loop
