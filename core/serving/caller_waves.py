"""CallerWaves: callers that are answered together come back together, and their next requests run as one batch."""

from __future__ import annotations

import math

MIN_CALLERS = 4
QUIET_S = 0.002
"""How long to wait for the next caller after the last one came back, in seconds."""
LONGEST_S = 0.05
"""How long callers are waited for after their answers, in seconds."""


class CallerWaves:
    """How long the engine should wait for callers that it has just answered.

    Threads that each ask, wait and ask again are answered in one step and come back one by one. A step begun with the
    first of them would run nearly empty, and each of the others would interrupt the decoding of those before. A caller
    is a hand-over of one request. Not thread-safe.
    """

    def __init__(self) -> None:
        self._num_open = 0  # callers whose request has not ended
        self._num_answered = 0  # callers that were answered in this wave
        self._num_back = 0  # callers that have asked since
        self._answered_s = -math.inf
        self._last_s = 0.0

    def asked(self, now: float) -> None:
        """Note that a caller has submitted a request."""
        self._num_open += 1
        self._num_back += 1
        self._last_s = now

    def answered(self, now: float) -> None:
        """Note that the request of a caller has ended."""
        if now - self._answered_s > LONGEST_S:
            self._num_answered = self._num_back = 0
        self._num_open -= 1
        self._num_answered += 1
        self._answered_s = self._last_s = now

    def pause_s(self, now: float) -> float:
        """Seconds to wait for more callers before the next step; 0 or less to go on.

        Nobody is waited for while more requests run than callers may come back.
        """
        num_running = self._num_open - self._num_back
        if self._num_answered < MIN_CALLERS or not num_running <= self._num_answered > self._num_back:
            return 0.0
        return min(self._last_s + QUIET_S, self._answered_s + LONGEST_S) - now
