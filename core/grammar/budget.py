"""The budget of compiling one constraint: time and memory, checked inside every loop that may be long.

Time is the processor time of the thread that compiles, so that a busy machine, or other threads of a busy process, do
not get a constraint refused. By the clock it ends as well, but far later.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import Protocol

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.spec import Limits

WALL_FACTOR = 25
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


_stopped = False
_current: ContextVar[_Budget | None] = ContextVar("graftlm grammar budget", default=None)


class limited:
    """Let `check` raise once `share` of the time in `limits` is spent; the ends of an outer block hold too."""

    __slots__ = ("_limits", "_share", "_token")

    _token: Token[_Budget | None] | None

    def __init__(self, limits: Limits, share: float = 1.0) -> None:
        self._limits, self._share = limits, share

    def __enter__(self) -> None:
        outer, limits = _current.get(), self._limits
        if outer is not None and outer.limits is limits and self._share >= 1.0:  # begun before, it ends before
            self._token = None
            return
        seconds, now = self._share * limits.seconds, time.monotonic()
        ends = (now + seconds, time.thread_time() + seconds, now + WALL_FACTOR * seconds)
        if outer is not None:
            ends = (min(ends[0], outer.soonest), min(ends[1], outer.cpu_end), min(ends[2], outer.wall_end))
        self._token = _current.set(_Budget(limits, *ends))

    def __exit__(self, *_: object) -> None:
        if self._token is not None:
            _current.reset(self._token)


class TooManyStates(GrammarError):
    """The constraint needs more states than `limits.states`."""


class Unwanted(GrammarError):
    """No request waits for the constraint any more."""


class Waiting(Protocol):
    """The requests that wait for a constraint."""

    num_waiting: int


_waiting: ContextVar[Waiting | None] = ContextVar("graftlm grammar waiting", default=None)


@contextmanager
def while_waited_for(waiting: Waiting) -> Iterator[None]:
    """Let `check` raise Unwanted once no request waits."""
    token = _waiting.set(waiting)
    try:
        yield
    finally:
        _waiting.reset(token)


TURN_S, UNDISTURBED_S, RECENT_S = 0.0005, 0.005, 0.1
"""Seconds that a constraint is compiled between two pauses, seconds before the first pause, and seconds for which
requests count as running after they were seen to run."""
SHARE, LONG_SHARE, CREDIT_S = 1 / 5, 1 / 20, 0.2
"""Share of Python's lock that the compilations of a lane take together while requests run: at first, and after CREDIT_S
seconds of work, which come back as fast as the lower share takes them."""


class Yielding:
    """Pauses of compilations beside requests, which get Python's lock first. Without requests there are none.

    A compilation that ends because nobody waits for it takes the whole credit along: those who send constraints and
    leave get the lower share from then on, and the others who share their lane as long as they do it.

    busy  whether requests run; called from any thread, at most once a turn
    """

    def __init__(self, busy: Callable[[], bool]) -> None:
        self._busy = busy
        self._seen_s = self._credited_s = -RECENT_S
        self._credit_s = CREDIT_S
        self._threads: set[int] = set()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Let `check` pause in this block."""
        thread = threading.get_ident()
        self._threads.add(thread)
        token = _turn.set(_Turn(self, time.monotonic() + UNDISTURBED_S))
        try:
            yield
        except Unwanted:
            self._credit_s, self._credited_s = 0.0, time.monotonic()
            raise
        finally:
            _turn.reset(token)
            self._threads.discard(thread)

    def pause(self, now: float) -> float:
        """Sleep while requests run. -> the time afterwards"""
        if self._busy():
            self._seen_s = now
        if now > self._seen_s + RECENT_S:
            return now
        earned_s, self._credited_s = LONG_SHARE * (now - self._credited_s), now
        self._credit_s = min(self._credit_s + earned_s, CREDIT_S) - TURN_S
        share = SHARE if self._credit_s > 0 else LONG_SHARE
        time.sleep(TURN_S * (len(self._threads) / share - 1))
        return time.monotonic()


@dataclass
class _Turn:
    """When the next pause of a compilation is due, by the clock."""

    yielding: Yielding
    ends_s: float


_turn: ContextVar[_Turn | None] = ContextVar("graftlm grammar turn", default=None)


def stop() -> None:
    """Let every later `check` raise: the interpreter exits."""
    global _stopped
    _stopped = True


def check(num_bytes: int = 0) -> None:
    """Raise GrammarError when the time is spent, or `num_bytes` for one automaton are too many."""
    if _stopped:
        raise GrammarError("the constraint was not compiled, because the interpreter exits")
    waiting = _waiting.get()
    if waiting is not None and waiting.num_waiting <= 0:
        raise Unwanted("no request waits for the constraint any more")
    budget = _current.get()
    if budget is None:
        return
    limits = budget.limits
    if num_bytes and num_bytes > limits.memory_bytes:
        raise GrammarError(
            f"the constraint needs more than {limits.memory_bytes:,} bytes to compile; "
            "simplify it (overlapping parts that repeat cost most) or raise limits.memory_bytes"
        )
    now = time.monotonic()
    turn = _turn.get()
    if turn is not None and now > turn.ends_s:
        now = turn.yielding.pause(now)
        turn.ends_s = now + TURN_S
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
