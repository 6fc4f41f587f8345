"""CallerWaves: callers that are answered together come back together, and their next requests run as one batch."""

from __future__ import annotations

import math

MIN_CALLERS = 4
QUIET_S = 0.002
"""How long to wait for the next caller after the last one came back, in seconds."""
LONGEST_S = 0.05
"""How long callers are waited for after the last one heard of its answer, in seconds."""


class CallerWaves:
    """Counts the callers that an engine has just answered, and says whether to wait for them.

    Threads that each ask, wait and ask again are answered in one step and come back one by one. A step begun with the
    first of them would run nearly empty, and each of the others would interrupt the decoding of those before. A caller
    is a hand-over of one request. Not thread-safe.
    """

    def __init__(self) -> None:
        self._num_open = 0  # callers whose request has not ended
        self._num_answered = 0  # callers that were answered in this wave
        self._num_told = 0  # callers that have heard of it
        self._num_back = 0  # callers that have asked since
        self._answered_s = -math.inf
        self.since_s = -math.inf
        """When the first caller of this wave was answered: who asks later is part of the next one."""

    def asked(self) -> None:
        """A caller has handed over a request."""
        self._num_open += 1
        self._num_back += 1

    def answered(self, now: float) -> None:
        """The request of a caller has ended."""
        if now - self._answered_s > LONGEST_S:
            self._num_answered = self._num_told = self._num_back = 0
            self.since_s = now
        self._num_open -= 1
        self._num_answered += 1
        self._answered_s = now

    def told(self, num: int, now: float) -> None:
        """So many of the callers whose requests have ended hear of it now."""
        self._num_told += num
        self._answered_s = now

    @property
    def num_awake(self) -> int:
        """Callers that know their answers and have not come back."""
        return self._num_told - self._num_back

    @property
    def part(self) -> int:
        """How many callers to answer at once: half of them, so that some come back while prompts are computed."""
        return max(MIN_CALLERS, (self._num_answered + 1) // 2)

    def gathering(self, now: float) -> bool:
        """Whether more callers may come back soon. Never while more requests run than callers may come back."""
        num_running = self._num_open - self._num_back
        if self._num_answered < MIN_CALLERS or not num_running <= self._num_answered > self._num_back:
            return False
        return now < self._answered_s + LONGEST_S
