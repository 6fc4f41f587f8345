"""StepRetry: after a step has failed, its sequences run again in parts, so that only the one that fails alone ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from graftlm.core.errors import EngineError
from graftlm.core.execution.step_plan import PlanRow, ScheduledRow
from graftlm.core.sequence import Sequence

NUM_PARTS = 4
"""Parts of a failed step. Of up to so many sequences each runs alone at once; of 256 after four failures at most."""


class StepRetry:
    """Which sequences may run after a step has failed.

    What a model or a kernel raises does not say whose row it was. The sequences of the step are cut into parts, and
    steps hold one part at a time until each sequence has come as far as the step would have. A part that fails is cut
    again; a sequence that fails alone is the cause.
    """

    def __init__(self) -> None:
        self._parts: deque[dict[Sequence, int]] = deque()

    @property
    def active(self) -> bool:
        return bool(self._parts)

    def part(self) -> Mapping[Sequence, int] | None:
        """The sequences that may run, and how many of their tokens must be computed; None if all may run.

        Steps before must have completed: a sequence that has come so far is let go.
        """
        while self._parts:
            part = self._parts[0]
            for sequence, goal in list(part.items()):
                progress = sequence.progress
                if progress.status == "running" and progress.num_computed >= min(goal, sequence.num_tokens):
                    del part[sequence]
            if part:
                return part
            self._parts.popleft()
        return None

    def failed(self, goals: Mapping[Sequence, int]) -> Sequence | None:
        """Note that a step failed. -> the sequence that ran alone in it, if one did

        goals  the sequences of the step, and how many tokens of each it would have computed
        """
        for sequence in goals:
            self.forget(sequence)
        if len(goals) == 1:
            return next(iter(goals))
        size = -(-len(goals) // NUM_PARTS)
        items = list(goals.items())
        self._parts.extendleft(reversed([dict(items[i : i + size]) for i in range(0, len(items), size)]))
        return None

    def forget(self, sequence: Sequence) -> None:
        """Leave out a sequence that has ended."""
        if self._parts:
            for part in self._parts:
                part.pop(sequence, None)
            self._parts = deque(part for part in self._parts if part)

    def clear(self) -> None:
        """Let all sequences run together again."""
        self._parts.clear()


def goal_of(row: ScheduledRow | PlanRow) -> int:
    """How many tokens of the row's sequence are computed after its step."""
    past = row.past if isinstance(row, PlanRow) else row.sequence.progress.num_computed
    return past + row.num_new - len(row.drafts)


def step_error(what: str, cause: BaseException) -> EngineError:
    error = EngineError(f"{what}: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error
