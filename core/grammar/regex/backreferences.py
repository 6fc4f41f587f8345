r"""Backreferences to groups of few texts: `(['"]).*\1` is one alternative for each text of the group.

While a pattern with backreferences is parsed, its groups and they are rules; `resolved` takes them out.
"""

from __future__ import annotations

from collections.abc import Iterator

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.ast import (
    EMPTY,
    MAX_CODE_POINT,
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
    concat,
    intersect,
    is_nothing,
    literal,
    repeat,
)
from graftlm.core.grammar.automata import charsets
from graftlm.core.grammar.budget import check
from graftlm.core.grammar.node_texts import MOST_TEXTS, texts_of
from graftlm.core.grammar.regex.flags import Flags

_MAX_WAYS = 1_000


class ManyTextsError(GrammarError):
    """A backreference asks for a group of too many texts."""


class Captured(Rule):
    """A group, or a place that asks for its text again."""

    __slots__ = ("number",)
    number: int


class Group(Captured):
    """The group `number`, which matches `body`."""

    __slots__ = ("body",)
    body: Node

    def __init__(self, number: int, body: Node) -> None:
        super().__init__(f"({number}")
        object.__setattr__(self, "number", number)
        object.__setattr__(self, "body", body)


class Backreference(Captured):
    """The text of the group `number` again; `unset` where the group has none."""

    __slots__ = ("flags", "position", "unset")
    flags: Flags
    position: int
    unset: Node

    def __init__(self, number: int, position: int, flags: Flags, *, unset: Node) -> None:
        super().__init__(f"\\{position}")
        for name, value in (("number", number), ("position", position), ("flags", flags), ("unset", unset)):
            object.__setattr__(self, name, value)

    def spelled(self, text: str | None) -> Node:
        if text is None:
            return self.unset
        if not self.flags.ignore_case:
            return literal(text)
        return concat(*(char_set(_cases(char, self.flags.ascii_only)) for char in text))


def _cases(char: str, ascii_only: bool) -> list[Range]:
    """`char` in every case. `re` compares the lower cases of what a group matched: ſ is no s there."""
    found = charsets.ignore_case(((ord(char), ord(char)),), ascii_only)
    codes = [code for low, high in found for code in range(low, high + 1)]
    return [(code, code) for code in codes if chr(code).lower()[0] == char.lower()[0]]


def resolved(node: Node, among: tuple[Range, ...] | None = None) -> Node:
    """`node` without groups and backreferences.

    among  characters that all texts are made of, where that is known

    Raises ManyTextsError for a backreference to a group of many texts, or to one in a repeat.
    """
    return _Resolver(among).of(node)


def characters_of(node: Node) -> Iterator[Range]:
    """The characters that texts of `node` are made of; those that lookarounds ask for are not among them."""
    match node:
        case Literal(data):
            yield from ((ord(char), ord(char)) for char in data.decode())
        case CharSet(ranges):
            yield from ranges
        case Group():
            yield from characters_of(node.body)
        case Backreference(flags=flags) if flags.ignore_case:  # other cases of what the group matched
            yield 0, MAX_CODE_POINT
        case Concat(items) | Alternation(items):
            for item in items:
                yield from characters_of(item)
        case Repeat(item, _, _):
            yield from characters_of(item)


def _among(node: Node, ranges: tuple[Range, ...]) -> Node:
    """The texts of `node` that are made of characters in `ranges`."""
    match node:
        case CharSet(own):
            return char_set(intersect(own, ranges))
        case Concat(items):
            return concat(*(_among(item, ranges) for item in items))
        case Alternation(items):
            return alternation(*(_among(item, ranges) for item in items))
        case Repeat(item, low, high):
            return repeat(_among(item, ranges), low, high)
    return node


class _Resolver:
    def __init__(self, among: tuple[Range, ...] | None) -> None:
        self._among = among
        self._num_ways = 0

    def of(self, node: Node, *, repeated: bool = False) -> Node:
        """`repeated`: whether `node` may follow itself, and a group in it keep the text of an earlier time."""
        check()
        match node:
            case Group():
                return self.of(node.body, repeated=repeated)
            case Backreference():
                raise _refusal(node)
            case Concat(items):
                for i, item in enumerate(items):
                    for group in _groups(item):
                        asking = next((ref for later in items[i + 1 :] for ref in _asking(later, group.number)), None)
                        if asking is not None:
                            end = _end_of_asking(items, i)
                            ways = self._ways(items[i:end], 0, group, asking, repeated=repeated)
                            found = alternation(*(self.of(way, repeated=repeated) for way in ways))
                            before, after = (
                                self.of(concat(*part), repeated=repeated) for part in (items[:i], items[end:])
                            )
                            return concat(before, found, after)
                return concat(*(self.of(item, repeated=repeated) for item in items))
            case Alternation(items):
                return alternation(*(self.of(item, repeated=repeated) for item in items))
            case Repeat(item, low, high):
                return repeat(self.of(item, repeated=repeated or high != 1), low, high)
        return node

    def _ways(
        self, items: tuple[Node, ...], at: int, group: Group, asking: Backreference, *, repeated: bool
    ) -> Iterator[Node]:
        """`items` for each text of `group`, which lies in the one at `at`, and for none."""
        body = self.of(group.body)
        texts = texts_of(body if self._among is None else _among(body, self._among))
        if texts is None:
            raise _refusal(asking)
        for text in (*sorted(texts), None):
            bound = _bound(items[at], group.number, text, asking)
            if not is_nothing(bound):
                self._num_ways += 1
                if (text is None and repeated) or self._num_ways > _MAX_WAYS:
                    raise _refusal(asking)
                parts = (*items[:at], bound, *items[at + 1 :])
                yield concat(*(_answered(part, group.number, text) for part in parts))


def _refusal(asking: Backreference) -> GrammarError:
    return ManyTextsError(
        f"regex, position {asking.position}: a backreference is kept to a group of at most {MOST_TEXTS} texts "
        f"({_MAX_WAYS:,} ways for all groups) that lies in no repeat or lookaround without it; write them out",
        position=asking.position,
    )


def _groups(node: Node) -> Iterator[Group]:
    match node:
        case Group():
            yield node
            yield from _groups(node.body)
        case Concat(items) | Alternation(items):
            for item in items:
                yield from _groups(item)
        case Repeat(item, _, _):
            yield from _groups(item)


def _end_of_asking(items: tuple[Node, ...], start: int) -> int:
    """The least end for which no item from there on asks for a group in `items[start:end]`."""
    end, i = start + 1, start
    while i < end:
        numbers = [group.number for group in _groups(items[i])]
        for j in range(end, len(items)):
            if any(True for number in numbers for _ in _asking(items[j], number)):
                end = j + 1
        i += 1
    return end


def _asking(node: Node, number: int) -> Iterator[Backreference]:
    match node:
        case Backreference():
            if node.number == number:
                yield node
        case Group():
            yield from _asking(node.body, number)
        case Concat(items) | Alternation(items):
            for item in items:
                yield from _asking(item, number)
        case Repeat(item, _, _):
            yield from _asking(item, number)


def _bound(node: Node, number: int, text: str | None, asking: Backreference) -> Node:
    """What `node` matches where the group `number`, which lies in it, matches `text`; None where it is not met."""
    if all(group.number != number for group in _groups(node)):
        return node if text is None else NOTHING
    match node:
        case Group():
            if node.number != number:
                return Group(node.number, _bound(node.body, number, text, asking))
            return NOTHING if text is None else literal(text)
        case Concat(items):
            inside = [any(group.number == number for group in _groups(item)) for item in items]
            pairs = zip(items, inside, strict=True)
            return concat(*(_bound(item, number, text, asking) if holds else item for item, holds in pairs))
        case Alternation(items):
            return alternation(*(_bound(item, number, text, asking) for item in items))
        case Repeat(item, low, 1):
            bound = _bound(item, number, text, asking)
            return alternation(EMPTY, bound) if low == 0 and text is None else bound
    raise _refusal(asking)


def _answered(node: Node, number: int, text: str | None) -> Node:
    """`node` with `text` where it asks for that of the group `number`."""
    match node:
        case Backreference():
            return node.spelled(text) if node.number == number else node
        case Group():
            return Group(node.number, _answered(node.body, number, text))
        case Concat(items):
            return concat(*(_answered(item, number, text) for item in items))
        case Alternation(items):
            return alternation(*(_answered(item, number, text) for item in items))
        case Repeat(item, low, high):
            return repeat(_answered(item, number, text), low, high)
    return node
