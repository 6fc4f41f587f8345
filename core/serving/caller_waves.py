"""CallerWaves: callers that are answered together come back together, and are admitted again in groups."""

from __future__ import annotations

import math

GROUPS = 8
"""Maximum number of groups of callers. While the device runs one group, the next one returns."""
QUIET_S = 0.002
"""Seconds to wait for the next caller after the last one returned."""
LONGEST_S = 0.05
"""Maximum wait for callers after their answers, in seconds."""


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
