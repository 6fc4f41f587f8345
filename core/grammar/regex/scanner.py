"""A place in the text of a pattern, and what is read there."""

from __future__ import annotations

from typing import NoReturn

from graftlm.core.errors import GrammarError

_MAX_COUNT = 1 << 24
_QUANTIFIERS = frozenset("*+?{")
"""What a quantifier begins with."""


class Scanner:
    """Reads a pattern from left to right. Raises GrammarError with the position of what cannot be read."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def _take(self, sign: str) -> bool:
        taken = self._text.startswith(sign, self._at)
        self._at += len(sign) if taken else 0
        return taken

    def _digits(self) -> str:
        start = self._at
        while self._at < len(self._text) and self._text[self._at] in "0123456789":
            self._at += 1
        return self._text[start : self._at]

    def _until(self, sign: str) -> str:
        """The text up to `sign`, and go on behind it; "" where there is none, and stay."""
        start, end = self._at, self._text.find(sign, self._at)
        self._at = max(end, start - 1) + 1
        return self._text[start:end] if end >= 0 else ""

    def _quantifier(self) -> tuple[int, int | None] | None:
        """Read `*`, `+`, `?` or `{m,n}`; braces that hold no counts are characters."""
        here = self._at
        if self._text[here : here + 1] not in _QUANTIFIERS:
            return None
        if self._take("*"):
            return 0, None
        if self._take("+"):
            return 1, None
        if self._take("?"):
            return 0, 1
        self._at += 1
        low = self._digits()
        comma = self._take(",")
        high = self._digits() if comma else low
        if not self._take("}") or not (low or comma):
            self._at = here
            return None
        minimum, maximum = int(low or 0), int(high) if high else None
        if max(minimum, maximum or 0) > _MAX_COUNT:
            self._fail(f"a repeat count is above {_MAX_COUNT:,}; leave the upper bound open", here)
        if maximum is not None and maximum < minimum:
            self._fail(f"the repeat {{{minimum},{maximum}}} has its minimum above its maximum; swap them", here)
        return minimum, maximum

    def _counts_at(self, start: int) -> bool:
        self._at = start
        found = self._quantifier() is not None
        self._at = start + 1
        return found

    def _fail(self, reason: str, position: int | None = None) -> NoReturn:
        at = self._at if position is None else position
        raise GrammarError(f"regex {self._text!r}, position {at}: {reason}", position=at)
