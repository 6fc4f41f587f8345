"""EndedEngine: the stand-in for an engine that failed to start or has ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from graftlm.core.metrics import Stats

if TYPE_CHECKING:
    from graftlm.core.request import Submission


class EndedEngine:
    """An engine that ends every request with the cause."""

    idle = True

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def add(self, submissions: Sequence[Submission]) -> None:
        for submission in submissions:
            submission.listener.on_error(self._error)

    def step(self) -> bool:
        return False

    def cancel(self, submission_id: int) -> None:
        """Nothing runs."""

    def fail_all(self, error: BaseException) -> None:
        """Nothing runs."""

    def stats(self) -> Stats:
        return Stats()

    def reset_stats(self) -> None:
        """Nothing was counted."""

    def clear_cache(self) -> None:
        """Nothing is cached."""

    def unpin(self, pin: int) -> None:
        """Nothing is pinned."""

    def close(self) -> None:
        """Nothing is held."""
