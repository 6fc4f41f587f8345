"""What may stand beside a place in a regex: lookaheads, lookbehinds and the boundaries of words."""

from __future__ import annotations

from graftlm.core.grammar.ast import ANY_CHAR, Node, Rule, alternation, char_set, complement, concat, intersect
from graftlm.core.grammar.automata import charsets


class Lookaround(Rule):
    """A place beside which a text of `body` must stand or, with `refused`, must not stand.

    wide  whether `$` in `body` also matches before a line break that ends the text.
    """

    __slots__ = ("body", "position", "refused", "wide")
    body: Node
    refused: bool
    position: int
    wide: bool

    def __init__(self, body: Node, refused: bool, position: int, *, wide: bool = False) -> None:
        super().__init__(f"{self._SIGN}{position}")
        for name, value in (("body", body), ("refused", refused), ("position", position), ("wide", wide)):
            object.__setattr__(self, name, value)

    _SIGN = ""


class Lookahead(Lookaround):
    """Its text follows."""

    __slots__ = ()
    _SIGN = "?"


class Lookbehind(Lookaround):
    """Its text ends there."""

    __slots__ = ()
    _SIGN = "<"


KINDS = {"?=": (Lookahead, False), "?!": (Lookahead, True), "?<=": (Lookbehind, False), "?<!": (Lookbehind, True)}
"""How each begins, and whether it refuses."""


_PLAIN = ((0, 0x7F), (0xA0, 0xBF), (0x2000, 0x206F), (0x2190, 0x2BFF), (0x3000, 0x303F), (0x1F300, 0x1FAFF))
"""ASCII, punctuation and symbols. Which others may be words is not told apart: that takes thousands of states."""


def boundary(position: int, *, is_one: bool, wide: bool | None, ascii_only: bool) -> Node:
    """A place between a word and what is none or, unless `is_one`, between two of a kind; in an empty text neither.

    wide  where dialects differ in what belongs to a word: whether what may belong to it counts; None for Python's.
    """
    if wide is None:
        word = unlike_word = charsets.category("w", ascii_only)
    else:
        sure, maybe = (charsets.portable_category("w", wide=way) for way in (False, True))
        maybe = complement(intersect(_PLAIN, complement(maybe)))
        word, unlike_word = (maybe, sure) if wide else (sure, maybe)

    def between(before_is_word: bool, after_is_word: bool) -> Node:
        before, after = (char_set(word if is_word else unlike_word) for is_word in (before_is_word, after_is_word))
        return concat(Lookbehind(before, not before_is_word, position), Lookahead(after, not after_is_word, position))

    if is_one:
        return alternation(between(True, False), between(False, True))
    some = alternation(Lookbehind(ANY_CHAR, False, position), Lookahead(ANY_CHAR, False, position))
    return alternation(between(True, True), concat(some, between(False, False)))
