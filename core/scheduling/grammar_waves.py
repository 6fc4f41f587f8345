"""GrammarWaves: requests whose grammars are compiled together begin to write together."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graftlm.core.scheduling.scheduler import Scheduler
    from graftlm.core.sequence import Sequence

QUIET_S = 0.01
"""How long to wait for the next grammar after the last one was compiled, in seconds: the thread that takes them in may
wait 5 ms for Python's lock, and a step with few rows takes longer than this from the others.
"""
LONGEST_S = 0.06
"""How long the first row waits, in seconds."""


class GrammarWaves:
    """How long rows that could write their first token wait for those whose grammars are being compiled.

    Grammars of requests that arrive together are compiled in processes of their own, and a thread takes them in one
    after the other. A step with the first of them takes Python's lock from that thread and as long as one with all.
    Nobody waits while a row decodes or a prompt can run. Not thread-safe.

    poll_s  how soon to ask again, in seconds, while rows wait; None while they do not
    """

    def __init__(self) -> None:
        self.poll_s: float | None = None
        self._began_s: float | None = None

    def hold(self, scheduler: Scheduler, num_compiling: int, compiled_s: float, now: float) -> bool:
        """Whether the rows wait: for one of `num_compiling` grammars, at `now`, the last compiled at `compiled_s`."""
        self.poll_s = None
        if not num_compiling or scheduler.waiting or not all(_begins(sequence) for sequence in scheduler.running):
            self._began_s = None
            return False
        if self._began_s is None:
            self._began_s = now
        left_s = min(max(self._began_s, compiled_s) + QUIET_S, self._began_s + LONGEST_S) - now
        if left_s > 0:
            self.poll_s = left_s
        return left_s > 0


def _begins(sequence: Sequence) -> bool:
    """Whether a constrained row has sampled nothing, and nothing of its prompt is left to run but the last token.

    What its grammar forces at the start may be in the cache.
    """
    progress = sequence.progress
    return (
        sequence.grammar is not None
        and sequence.num_prompt_tokens - progress.num_computed <= 1
        and sequence.num_generated == sequence.output.num_forced
        and not progress.num_in_flight
    )
