"""Log-probabilities of captured texts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from graftlm.adapters.guidance.parser import Progress
from graftlm.core.request import TokenLogprob


class Scores:
    """The tokens of one grammar's text with their log-probabilities (natural log); forced ones have 0.

    The log-probability of a capture is the sum over its tokens, partly included ones too. Guidance's own local engines
    report 0 for every capture.
    """

    def __init__(self, token_bytes: list[bytes]) -> None:
        self._token_bytes = token_bytes
        self._text = bytearray()
        self._tokens: list[tuple[int, float]] = []  # end offset of each token in bytes, and its log-probability

    def put(self, tokens: Iterable[int]) -> None:
        """Add tokens that the grammar forced before the first sampled one."""
        for token_id in tokens:
            self._add(token_id, 0.0)

    def step(self, step: Progress, scored: deque[TokenLogprob]) -> list[tuple[int, TokenLogprob | None]]:
        """Add the tokens of a step; return each with its entry of `scored`, which is consumed."""
        for _ in range(min(step.num_backtracked, len(self._tokens))):
            self._tokens.pop()
        del self._text[self._tokens[-1][0] if self._tokens else 0 :]
        found: list[tuple[int, TokenLogprob | None]] = []
        for i, token_id in enumerate(step.tokens):
            entry = _next(scored, token_id)
            sampled = i == 0 and step.issued and entry is not None and entry.logprob is not None
            self._add(token_id, entry.logprob or 0.0 if sampled and entry is not None else 0.0)
            found.append((token_id, entry))
        return found

    def of(self, captures: dict[str, Any]) -> dict[str, Any]:
        """Return the log-probability of each captured text, in the shape of `captures`."""
        return {
            name: [self._score(one) for one in value] if isinstance(value, list) else self._score(value)
            for name, value in captures.items()
        }

    def _add(self, token_id: int, logprob: float) -> None:
        self._text += self._token_bytes[token_id] if token_id < len(self._token_bytes) else b""
        self._tokens.append((len(self._text), logprob))

    def _score(self, text: bytes) -> float:
        """Return the log-probability of the last occurrence of `text`."""
        first = self._text.rfind(text)
        if first < 0 or not text:
            return 0.0
        total, start = 0.0, 0
        for end, logprob in self._tokens:
            if start < first + len(text) and end > first:
                total += logprob
            start = end
        return total


def _next(scored: deque[TokenLogprob], token_id: int) -> TokenLogprob | None:
    """Return the next entry with this id; entries before it were sampled but not accepted."""
    while scored:
        entry = scored.popleft()
        if entry.token_id == token_id:
            return entry
    return None
