"""Read the smallest parts of a pattern: flags, quantifiers, escapes."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import NoReturn

from graftlm.core.errors import GrammarError, shortened
from graftlm.core.grammar.nodes.nodes import Range

FLAGS = {"i": "ignore_case", "s": "dot_all", "m": "multiline", "x": "verbose", "a": "ascii_only"}


@dataclass(frozen=True)
class Flags:
    ignore_case: bool = False
    dot_all: bool = False
    multiline: bool = False
    verbose: bool = False
    ascii_only: bool = False

    def changed(self, letter: str, value: bool) -> Flags | None:
        """These flags with that of `letter` set to `value`; None for a letter that is no flag."""
        if letter == "u":
            return replace(self, ascii_only=False)
        return replace(self, **{FLAGS[letter]: value}) if letter in FLAGS else None


CONTROLS = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_OCTAL_DIGITS = re.compile("[0-7]{1,3}")
_OCTAL = re.compile("[0-3][0-7][0-7]")
_PAIR = r"\\u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})"
_PAIRS = re.compile(f"{_PAIR}-{_PAIR}")
_ONE_PAIR = re.compile(_PAIR)


def is_octal(text: str, at: int) -> bool:
    """Whether three digits at `at` are a character in octal, and no backreference."""
    return _OCTAL.match(text, at) is not None


def octal_digits(text: str, at: int) -> str:
    """Up to three digits at `at`, of which there is one at least."""
    found = _OCTAL_DIGITS.match(text, at)
    assert found is not None
    return found.group()


def ranges_of(member: int | tuple[Range, ...]) -> tuple[Range, ...]:
    """The characters of a code point or a category."""
    return ((member, member),) if isinstance(member, int) else member


def surrogate_range(text: str, at: int) -> tuple[Range, int] | None:
    r"""The range at `at` whose ends are surrogate pairs, as in [\uD800\uDC00-\uDBFF\uDFFF], and where it ends.

    ECMA-262 reads it so. To who reads the four halves one by one the range runs backwards: there is no other reading.
    """
    found = _PAIRS.match(text, at)
    if found is None:
        return None
    high, low, last_high, last_low = (int(half, 16) for half in found.groups())
    return (_code_point(high, low), _code_point(last_high, last_low)), found.end()


def surrogate_pair(text: str, at: int) -> tuple[int, int] | None:
    r"""The character at `at` that is escaped as a pair, as in \uD83D\uDE00, and where it ends.

    ECMA-262 reads it so; to others these are two characters that no text has.
    """
    found = _ONE_PAIR.match(text, at)
    return None if found is None else (_code_point(*(int(half, 16) for half in found.groups())), found.end())


def _code_point(high: int, low: int) -> int:
    return 0x10000 + ((high - 0xD800) << 10) + low - 0xDC00


_MAX_COUNT = 1 << 24
_QUANTIFIERS = frozenset("*+?{")
"""Characters that begin a quantifier."""


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
        raise GrammarError(f"regex {shortened(self._text)}, position {at}: {reason}", position=at)
