"""Escapes of a regex that stand for one character, or for a range of them."""

from __future__ import annotations

import re

from graftlm.core.grammar.ast import Range

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
