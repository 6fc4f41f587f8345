"""WakeChain: wakes threads that were answered in one step one after the other."""

from __future__ import annotations

import threading
import time
from collections import deque

OVERDUE_S = 0.02
"""Seconds that a thread may take to wake the next one before `check` wakes all."""


class WakeChain:
    """A chain of threads: each thread, once awake, wakes the next.

    A thread sleeps in `acquire` of a lock that is held for it. If all threads woke at once, each would wait for the
    GIL, as would the engine's thread, whose device would idle. In a chain two threads compete for the GIL at a time.
    Any thread may call the methods.
    """

    def __init__(self) -> None:
        self._asleep: deque[threading.Lock] = deque()
        self._passed_on = False  # whether a woken thread has yet to wake the next
        self._paused = False
        self._closed = False
        self._woken_s = 0.0
        self._lock = threading.Lock()

    def wake(self, sleeper: threading.Lock) -> None:
        """Queue a thread's lock for release."""
        with self._lock:
            self._asleep.append(sleeper)
            if self._closed:
                self._release_all()
            elif not self._passed_on:
                self._release_next()

    def awake(self) -> None:
        """Wake the next thread; each thread calls this once awake."""
        with self._lock:
            self._release_next()

    def pause(self, paused: bool) -> None:
        """Pause or resume the chain."""
        with self._lock:
            self._paused = paused
            if not paused and not self._passed_on:
                self._release_next()

    def check(self) -> bool:
        """Wake all threads if the chain is overdue; return True if threads are still to be woken."""
        if not self._asleep:
            return False
        with self._lock:
            if self._passed_on and time.monotonic() - self._woken_s > OVERDUE_S:
                self._release_all()
            return bool(self._asleep)

    def close(self) -> None:
        """Wake all threads, and later ones immediately."""
        with self._lock:
            self._closed = True
            self._release_all()

    def _release_next(self) -> None:
        self._passed_on = bool(self._asleep) and not self._paused
        if self._passed_on:
            self._woken_s = time.monotonic()
            self._asleep.popleft().release()

    def _release_all(self) -> None:
        while self._asleep:
            self._asleep.popleft().release()
        self._passed_on = False
