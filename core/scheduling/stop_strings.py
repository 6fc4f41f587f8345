"""Stop strings, found in text that arrives piece by piece."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class StopPush(NamedTuple):
    """Text that is safe to show now, and the stop string that ended it, if one did."""

    text: str
    matched: str | None


class StopMatcher:
    """Find the stop string that is complete first, however the text is cut into pieces.

    Text that may be the beginning of a stop string is held back until the next push decides. Of stop strings
    that end at the same character the longest wins. After a match everything further is dropped.
    """

    def __init__(self, stop: Iterable[str]) -> None:
        self._stop = tuple(stop)
        self._starts = {s[:length] for s in self._stop for length in range(1, len(s))}
        self._longest = max(map(len, self._starts), default=0)
        self._first_characters = {s[0] for s in self._stop}
        self._held = ""
        self._matched: str | None = None

    def push(self, new_text: str) -> StopPush:
        """Take the next piece of text."""
        if self._matched is not None:
            return StopPush("", self._matched)
        if not self._held and self._first_characters.isdisjoint(new_text):
            return StopPush(new_text, None)
        text = self._held + new_text
        found = [(text.find(s) + len(s), text.find(s), s) for s in self._stop if s in text]
        if found:
            _, start, self._matched = min(found)
            self._held = ""
            return StopPush(text[:start], self._matched)
        keep = self._num_held(text)
        self._held = text[len(text) - keep :]
        return StopPush(text[: len(text) - keep], None)

    def flush(self) -> str:
        """Return what is still held back: the text ended before it could become a stop string."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for length in range(min(self._longest, len(text)), 0, -1):
            if text[-length:] in self._starts:
                return length
        return 0
