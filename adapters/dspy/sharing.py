"""Several answers to one prompt as one request, which pays the prompt once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import dspy
from dspy import lm15

_shared: ContextVar[Shared | None] = ContextVar("graftlm_shared", default=None)


class Shared:
    """Answers that are asked for together and taken one by one, by request.

    num        answers that may be taken of each request.
    per_call   how many are asked for at once.
    """

    def __init__(self, num: int, per_call: int) -> None:
        self._num = num
        self._per_call = per_call
        self._lock = threading.Lock()
        self._waiting: dict[str, list[lm15.Response]] = {}
        self._asked: dict[str, int] = {}

    def take(self, request: lm15.Request) -> tuple[lm15.Response | None, int]:
        """An answer that was asked for already, or None and how many to ask for now."""
        key = repr(request)
        with self._lock:
            if waiting := self._waiting.get(key):
                return waiting.pop(0), 0
            num = max(1, min(self._per_call, self._num - self._asked.get(key, 0)))
            self._asked[key] = self._asked.get(key, 0) + num
            return None, num

    def put(self, request: lm15.Request, answers: list[lm15.Response]) -> None:
        with self._lock:
            self._waiting.setdefault(repr(request), []).extend(answers)


def shared() -> Shared | None:
    """The answers that the surrounding call shares; None if it shares none."""
    return _shared.get()


@contextmanager
def sharing(num: int, per_call: int | None = None) -> Iterator[None]:
    """Inside, up to `num` answers to one request are asked for together, `per_call` at once."""
    token = _shared.set(Shared(num, per_call or num))
    try:
        yield
    finally:
        _shared.reset(token)


class BestOfN(dspy.BestOfN):
    """`dspy.BestOfN` whose attempts share requests: half of the answers come with the first, the rest if need be.

    The prompt is paid twice at most, not N times, and the first half of the answers takes the time of one; answers
    that come after one that meets the threshold are paid for nothing. For modules with one call before their answer
    all of it is shared, for others what their attempts ask alike. Needs an LM at an endpoint; others are as in DSPy.
    """

    def forward(self, **kwargs: Any) -> Any:
        with sharing(self.N, -(-self.N // 2)):
            return super().forward(**kwargs)
