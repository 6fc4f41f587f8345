"""CallerWaves: callers that are answered together come back together, and are admitted again in groups."""

from __future__ import annotations

import math

GROUPS = 8
"""Groups that callers are admitted in, at most. While the device runs one of them the next one comes back."""
QUIET_S = 0.002
"""How long to wait for the next caller after the last one came back, in seconds."""
LONGEST_S = 0.05
"""How long callers are waited for after their answers, in seconds."""


class CallerWaves:
    """How long requests of callers wait for those of others that were answered with them.

    Threads that each ask, wait and ask again are answered in one step and come back one by one. A step begun with the
    first of them would run nearly empty, and each of the others would interrupt the decoding of those before. If all
    of them were waited for, the device would do nothing meanwhile. So they are admitted in groups. A caller is a
    hand-over of one request. Not thread-safe.
    """

    def __init__(self) -> None:
        self._num_open = 0  # callers whose request has not ended
        self._num_due = 0  # callers that were answered and have not come back
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
        """Seconds for which requests wait for more callers; 0 or less to admit them."""
        num_callers = self._num_open + self._num_due
        if not self._num_due or GROUPS * self._num_held >= num_callers:
            return 0.0
        return min(self._last_s + QUIET_S, self._answered_s + LONGEST_S) - now
