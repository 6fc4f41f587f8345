"""Shared requests: several answers to one prompt in one request, which pays the prompt once."""

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
    """Answers that are requested together and consumed one by one, by request.

    num        number of answers that calls may consume per request.
    per_call   number of answers per request to the endpoint.
    """

    def __init__(self, num: int, per_call: int) -> None:
        self._num = num
        self._per_call = per_call
        self._lock = threading.Lock()
        self._waiting: dict[str, list[lm15.Response]] = {}
        self._asked: dict[str, int] = {}

    def take(self, request: lm15.Request) -> tuple[lm15.Response | None, int]:
        """Return an answer that was already requested, or None and the number of answers to request now."""
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
    """Return the answers that the surrounding call shares; None if it shares none."""
    return _shared.get()


@contextmanager
def sharing(num: int, per_call: int | None = None) -> Iterator[None]:
    """Request up to `num` answers to one request together inside the block, `per_call` at once."""
    token = _shared.set(Shared(num, per_call or num))
    try:
        yield
    finally:
        _shared.reset(token)


class BestOfN(dspy.BestOfN):
    """`dspy.BestOfN` whose attempts share requests: the first one brings half of the answers, a second one the rest.

    The prompt is paid at most twice instead of N times, and the first half of the answers takes the time of one.
    Answers after the first that meets the threshold are paid but unused. A module with one call per answer shares
    every request; other modules share the calls that are identical in all attempts. Requires an LM at an endpoint;
    for any other LM, DSPy's own `BestOfN` runs.
    """

    def forward(self, **kwargs: Any) -> Any:
        with sharing(self.N, -(-self.N // 2)):
            return super().forward(**kwargs)
