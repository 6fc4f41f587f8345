"""What may stand beside a place in a regex: lookaheads, lookbehinds and the boundaries of words."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from graftlm.core.grammar.ast import (
    ANY_CHAR,
    NOTHING,
    Alternation,
    CharSet,
    Concat,
    Literal,
    Node,
    Range,
    Repeat,
    Rule,
    alternation,
    char_set,
    complement,
    concat,
    intersect,
    literal,
    repeat,
)
from graftlm.core.grammar.automata import charsets

CHARACTERS = frozenset({Literal, CharSet})
"""Nodes in which there are no others: most of a pattern."""
_MOST_WAYS = 16
"""Alternatives that a lookahead is written out in; with more, its lookbehinds stay."""


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
    if wide:  # ECMA-262 has it in an empty text
        return alternation(between(True, True), between(False, False))
    some = alternation(Lookbehind(ANY_CHAR, False, position), Lookahead(ANY_CHAR, False, position))
    return alternation(between(True, True), concat(some, between(False, False)))


def possessive(char: Node, more: Node, least: int, most: int | None, position: int) -> Node:
    """As many of `char` as there are, between these bounds: none of `more` follows where another would do."""
    if most == least:
        return repeat(char, least, most)
    end = Lookahead(more, True, position)
    if most is None:
        return concat(repeat(char, least, None), end)
    return alternation(concat(repeat(char, least, most - 1), end), repeat(char, most, most))


def line_edge(position: int, *, is_start: bool, breaks: tuple[Range, ...]) -> Node:
    """The start of a line or its end: that of the text, or beside one of the characters `breaks`."""
    look = Lookbehind if is_start else Lookahead
    return alternation(Rule(f"{'^' if is_start else '$'}{position}"), look(char_set(breaks), False, position))


def looks_behind(node: Node) -> bool:
    """Whether there is a lookbehind in `node`."""
    match node:
        case Lookbehind():
            return True
        case Lookahead():
            return looks_behind(node.body)
        case Concat(items) | Alternation(items):
            return any([type(item) not in CHARACTERS and looks_behind(item) for item in items])
        case Repeat(item, _, _):
            return looks_behind(item)
    return False


def without_lookbehinds(node: Node) -> Node:
    r"""`node` without lookbehinds for one character that directly follow one, as in \d\b: they say which one it is.

    So what looks ahead may ask for the boundary of a word, and a pattern for one where its threads would be many.
    Other lookbehinds stay.
    """
    if not looks_behind(node):
        return node
    done: list[Node] = []
    work = [node]
    while work:
        way = work.pop()
        items = way.items if isinstance(way, Concat) else (way,)
        further = next((more for i in range(len(items)) if (more := _decided(items, i)) is not None), None)
        if further is None:
            done.append(way)
        elif len(done) + len(work) + len(further) > _MOST_WAYS:
            return node
        else:
            work += reversed(further)
    return _joined([way.items if isinstance(way, Concat) else (way,) for way in done if way != NOTHING])


def _joined(ways: Sequence[tuple[Node, ...]]) -> Node:
    """An alternative for each of `ways`; what they begin with alike, which may be long, is written once."""
    if not ways:
        return NOTHING
    # the very same nodes: lookarounds of one place are equal as rules
    num_alike = len(list(takewhile(lambda items: len(set(map(id, items))) == 1, zip(*ways, strict=False))))
    return concat(*ways[0][:num_alike], alternation(*(concat(*way[num_alike:]) for way in ways)))


def _decided(items: tuple[Node, ...], at: int) -> list[Node] | None:
    """`items` with the lookbehind at `at` said by the item before it, or for each way of an alternation there."""
    item = items[at]
    if isinstance(item, Alternation) and looks_behind(item):
        return [concat(*items[:at], way, *items[at + 1 :]) for way in item.items]
    before = next((i for i in reversed(range(at)) if not isinstance(items[i], Lookahead)), None)
    if before is None or not isinstance(item, Lookbehind) or not isinstance(item.body, CharSet):
        return None
    ranges = complement(item.body.ranges) if item.refused else item.body.ranges
    ending = _ending_in(items[before], ranges)
    return None if ending is None else [concat(*items[:before], ending, *items[before + 1 : at], *items[at + 1 :])]


def _ending_in(node: Node, ranges: tuple[Range, ...]) -> Node | None:
    """`node` with its last character in `ranges`; None where it need not end in a character that shows."""
    match node:
        case CharSet(own):
            return char_set(intersect(own, ranges))
        case Literal(data):
            text = data.decode()
            last = char_set(intersect(((ord(text[-1]), ord(text[-1])),), ranges))
            return NOTHING if last == NOTHING else literal(text)
        case Repeat(item, low, high) if low > 0:
            end = _ending_in(item, ranges)
            return None if end is None else concat(repeat(item, low - 1, None if high is None else high - 1), end)
    return None
