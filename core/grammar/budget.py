"""The budget of compiling one constraint: time and memory, checked inside every loop that may be long.

Time is the processor time of the thread that compiles, so that a busy machine, or other threads of a busy process, do
not get a constraint refused. By the clock it ends as well, but far later.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.spec import Limits

WALL_FACTOR = 10
"""How many times the limit may pass by the clock: a thread of a busy machine gets a part of one core."""


@dataclass(frozen=True)
class _Budget:
    """Until when a block may run.

    soonest   by the clock: no thread can have spent its processor time before
    cpu_end   by the processor time of this thread
    wall_end  by the clock, however little processor time it got
    """

    limits: Limits
    soonest: float
    cpu_end: float
    wall_end: float


_current: ContextVar[_Budget | None] = ContextVar("graftlm grammar budget", default=None)


@contextmanager
def limited(limits: Limits, share: float = 1.0) -> Iterator[None]:
    """Let `check` raise once `share` of the time in `limits` is spent; the ends of an outer block hold too."""
    outer = _current.get()
    seconds, now = share * limits.seconds, time.monotonic()
    ends = (now + seconds, time.thread_time() + seconds, now + WALL_FACTOR * seconds)
    if outer is not None:
        ends = (min(ends[0], outer.soonest), min(ends[1], outer.cpu_end), min(ends[2], outer.wall_end))
    token = _current.set(_Budget(limits, *ends))
    try:
        yield
    finally:
        _current.reset(token)


def check(num_bytes: int = 0) -> None:
    """Raise GrammarError when the time is spent, or `num_bytes` for one automaton are too many."""
    budget = _current.get()
    if budget is None:
        return
    limits = budget.limits
    if num_bytes > limits.memory_bytes:
        raise GrammarError(
            f"the constraint needs more than {limits.memory_bytes:,} bytes to compile; "
            "simplify it (overlapping parts that repeat cost most) or raise limits.memory_bytes"
        )
    now = time.monotonic()
    if now <= budget.soonest:  # a clock that costs a tenth of the other one
        return
    if time.thread_time() > budget.cpu_end:
        raise GrammarError(
            f"the constraint took longer than {limits.seconds:g} s to compile; simplify it or raise limits.seconds"
        )
    if now > budget.wall_end:
        raise GrammarError(
            f"the constraint took longer than {WALL_FACTOR * limits.seconds:g} s by the clock to compile, as this "
            "machine is busy; try again, simplify it or raise limits.seconds"
        )
