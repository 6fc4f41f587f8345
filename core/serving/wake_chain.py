"""WakeChain: threads that were answered together wake up one after the other."""

from __future__ import annotations

import threading
import time
from collections import deque

OVERDUE_S = 0.02
"""How long a thread may take to wake the next one, in seconds, before `check` wakes all."""


class WakeChain:
    """Wakes threads in turn: each of them, once awake, wakes the next.

    A thread sleeps in `acquire` of a lock that is held for it. If all were woken at once, each would wait for the GIL
    behind all others, and so would the engine's thread, whose device has nothing to do meanwhile. In a chain two
    threads want the GIL at a time. Any thread may call.
    """

    def __init__(self) -> None:
        self._asleep: deque[threading.Lock] = deque()
        self._passed_on = False  # whether a thread was woken that will wake the next
        self._paused = False
        self._closed = False
        self._woken_s = 0.0
        self._lock = threading.Lock()

    def wake(self, sleeper: threading.Lock) -> None:
        """Release a thread's lock, in its turn."""
        with self._lock:
            self._asleep.append(sleeper)
            if self._closed:
                self._release_all()
            elif not self._passed_on:
                self._release_next()

    def awake(self) -> None:
        """Wake the next thread. Each thread calls it as soon as it is awake."""
        with self._lock:
            self._release_next()

    def pause(self, paused: bool) -> None:
        """Wake nobody for a while, or go on."""
        with self._lock:
            self._paused = paused
            if not paused and not self._passed_on:
                self._release_next()

    def check(self) -> bool:
        """Wake all if the last thread woken does not wake the next one; whether threads are still to be woken."""
        if not self._asleep:
            return False
        with self._lock:
            if self._passed_on and time.monotonic() - self._woken_s > OVERDUE_S:
                self._release_all()
            return bool(self._asleep)

    def close(self) -> None:
        """Wake all, and from now on everyone at once."""
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
