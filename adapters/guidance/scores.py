"""How likely the model found what it wrote into a capture."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from graftlm.adapters.guidance.parser import Progress
from graftlm.core.request import TokenLogprob


class Scores:
    """The tokens of one grammar's text with their log-probabilities (natural log); forced ones have 0.

    The log-probability of a capture is the sum over the tokens that have a part in it. Guidance's own local engines
    report 0 for every capture.
    """

    def __init__(self, token_bytes: list[bytes]) -> None:
        self._token_bytes = token_bytes
        self._text = bytearray()
        self._tokens: list[tuple[int, float]] = []  # where each token ends, and its log-probability

    def put(self, tokens: Iterable[int]) -> None:
        """Tokens that the grammar forced before anything was sampled."""
        for token_id in tokens:
            self._add(token_id, 0.0)

    def step(self, step: Progress, scored: deque[TokenLogprob]) -> list[tuple[int, TokenLogprob | None]]:
        """Take the tokens of a step; give each with its entry of `scored`, which follows the sequence."""
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
        """The log-probability of each captured text, in the captures' own shape."""
        return {
            name: [self._score(one) for one in value] if isinstance(value, list) else self._score(value)
            for name, value in captures.items()
        }

    def _add(self, token_id: int, logprob: float) -> None:
        self._text += self._token_bytes[token_id] if token_id < len(self._token_bytes) else b""
        self._tokens.append((len(self._text), logprob))

    def _score(self, text: bytes) -> float:
        """Of the last place where `text` was written."""
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
    """The entry of the next such token; those before it were sampled, but not accepted."""
    while scored:
        entry = scored.popleft()
        if entry.token_id == token_id:
            return entry
    return None
