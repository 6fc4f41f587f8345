"""Callers that are answered in one step: admitted again in groups (CallerWaves), woken in turn (WakeChain)."""

from __future__ import annotations

import math
import threading
import time
from collections import deque

GROUPS = 8
"""Maximum number of groups of callers. While the device runs one group, the next one returns."""
QUIET_S = 0.002
"""Seconds to wait for the next caller after the last one returned."""
LONGEST_S = 0.05
"""Maximum wait for callers after their answers, in seconds."""
OVERDUE_S = 0.02
"""Seconds that a thread may take to wake the next one before `check` wakes all."""


class CallerWaves:
    """Admission control of callers: the delay of a request until callers answered in the same step return.

    Threads that submit one request after the other are answered in one step and return one by one. A step begun with
    the first request would run nearly empty, and each later prefill would interrupt decoding. If the engine waited for
    all of them, the device would idle. So callers are admitted in groups. A caller is a submission of one request.
    Not thread-safe.
    """

    def __init__(self) -> None:
        self._num_open = 0  # callers whose request has not ended
        self._num_due = 0  # callers that were answered and have not returned
        self._num_held = 0  # requests that wait for their group
        self._answered_s = -math.inf
        self._last_s = 0.0

    def asked(self, now: float) -> None:
        """Note that a caller has submitted a request."""
        self._num_open += 1
        self._num_held += 1
        self._num_due = max(0, self._num_due - 1)
        self._last_s = now

    def answered(self, now: float) -> None:
        """Note that the request of a caller has ended."""
        if now - self._answered_s > LONGEST_S:
            self._num_due = 0
        self._num_open -= 1
        self._num_due += 1
        self._answered_s = self._last_s = now

    def admitted(self) -> None:
        """Note that all requests that were held have been handed to the engine."""
        self._num_held = 0

    def hold_s(self, now: float) -> float:
        """Return the seconds for which requests wait for more callers; 0 or less admits them."""
        num_callers = self._num_open + self._num_due
        if not self._num_due or GROUPS * self._num_held >= num_callers:
            return 0.0
        return min(self._last_s + QUIET_S, self._answered_s + LONGEST_S) - now


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
