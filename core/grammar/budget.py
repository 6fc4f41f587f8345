"""What one constraint may cost to compile: wall time and memory, checked inside every loop that may be long."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.spec import Limits


@dataclass(frozen=True)
class _Budget:
    limits: Limits
    deadline: float


_current: ContextVar[_Budget | None] = ContextVar("graftlm grammar budget", default=None)


@contextmanager
def limited(limits: Limits, share: float = 1.0) -> Iterator[None]:
    """Let `check` raise once `share` of the time in `limits` is spent; an outer block's deadline holds too."""
    outer = _current.get()
    deadline = time.monotonic() + share * limits.seconds
    token = _current.set(_Budget(limits, min(deadline, outer.deadline) if outer is not None else deadline))
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
    if time.monotonic() > budget.deadline:
        raise GrammarError(
            f"the constraint took longer than {limits.seconds:g} s to compile; simplify it or raise limits.seconds"
        )
