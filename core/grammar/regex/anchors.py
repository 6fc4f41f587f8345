r"""Parts of a pattern that take no text: the anchors ^ and $, lookaheads, and \b.

While a pattern is parsed, these parts are rules. An anchor becomes the absence of other text on its side. A lookahead
becomes the intersection of the rest of the text with its body, or the difference. A \b splits the character before it
into two cases, each with a lookahead.
"""

from __future__ import annotations

from typing import NoReturn

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.automata import charsets
from graftlm.core.grammar.budget import check
from graftlm.core.grammar.nodes.nodes import (
    ANY_CHAR,
    EMPTY,
    NOTHING,
    Alternation,
    CharSet,
    Concat,
    Difference,
    Empty,
    Intersection,
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
    nullable,
    optional,
    repeat,
    star,
)

_LEAVES = frozenset({Literal, CharSet})
"""Nodes without children: most of a pattern."""
_PLAIN = ((0, 0x7F), (0xA0, 0xBF), (0x2000, 0x206F), (0x2190, 0x2BFF), (0x3000, 0x303F), (0x1F300, 0x1FAFF))
"""Characters that are told apart as words or not: ASCII, punctuation, symbols. All others take thousands of states."""


class Lookahead(Rule):
    """A position where a match of `body` must follow or, with `refused`, must not follow.

    wide  whether `$` in `body` also matches before a line break that ends the text.
    """

    __slots__ = ("body", "position", "refused", "wide")
    body: Node
    refused: bool
    position: int
    wide: bool

    def __init__(self, body: Node, refused: bool, position: int, *, wide: bool = False) -> None:
        super().__init__(f"?{'!' if refused else '='}{position}")
        for name, value in (("body", body), ("refused", refused), ("position", position), ("wide", wide)):
            object.__setattr__(self, name, value)


def start_anchor(position: int) -> Node:
    return Rule(f"^{position}")


def end_anchor(position: int) -> Node:
    return Rule(f"${position}")


def anchored(node: Node) -> Node:
    """Return the texts that `node` matches from end to end. Raises GrammarError for an anchor inside the pattern."""
    return alternation(*(_look(body, EMPTY, at_start=True) for _, body, _ in split(node)))


def found_anywhere(node: Node, *, wide: bool = False) -> Node:
    """Return the texts that contain a match of `node`, at the ends if anchors require that.

    wide  as in dialects where `$` also matches before a line break that ends the text.
    Raises GrammarError for an anchor inside the pattern.
    """
    around, end = star(ANY_CHAR), optional(literal("\n")) if wide else EMPTY
    # alternatives share the text around them: with texts of their own, an automaton distinguishes them to the end
    plain: dict[bool, tuple[list[Node], list[Node]]] = {}  # by whether they end the text: anchored at its start, others
    found = []
    for at_start, body, at_end in split(node):
        if _lookahead_in(body) is None:
            body = trimmed(body, start=not at_start, end=not at_end)
            plain.setdefault(at_end, ([], []))[not at_start].append(body)
            continue
        match_ = _look(body, end if at_end else around, at_start=at_start)
        found.append(match_ if at_start else concat(around, match_))
    for at_end, (first, anywhere) in plain.items():
        inside = [concat(around, alternation(*anywhere))] if anywhere else []
        found.append(concat(alternation(*first, *inside), end if at_end else around))
    return alternation(*found)


# -- lookaheads ------------------------------------------------------------------------------------------------


def _look(node: Node, rest: Node, *, at_start: bool) -> Node:
    """Return `node` followed by `rest`, the end of the text, with the lookaheads in `node` applied.

    at_start  whether `node` begins the text: only there may a lookahead have a `^`.
    """
    check()
    found = _lookahead_in(node)
    if found is None:
        return concat(node, rest)
    match node:
        case Lookahead():
            wanted = _wanted(node, at_start=at_start)
            return Difference(rest, wanted) if node.refused else Intersection((rest, wanted))
        case Concat(items):
            num_leading = next((i for i, item in enumerate(items) if not isinstance(item, Lookahead)), len(items))
            for i in reversed(range(len(items))):
                rest = _look(items[i], rest, at_start=at_start and i <= num_leading)
            return rest
        case Alternation(items):
            return alternation(*(_look(item, rest, at_start=at_start) for item in items))
    _fail(found.position, "a lookahead inside a repeat is not supported; write the repeated part without it")


def _wanted(ahead: Lookahead, *, at_start: bool) -> Node:
    """Return the ends of texts that begin as the lookahead requires."""
    around, found = star(ANY_CHAR), []
    for asks_for_start, body, ends in split(ahead.body):
        if asks_for_start and not at_start:
            _fail(
                ahead.position,
                "a ^ in a lookahead is supported at the start of a pattern that begins with ^; "
                "add that ^ or leave this one out",
            )
        end = optional(literal("\n")) if ahead.wide else EMPTY
        found.append(_look(body, end if ends else around, at_start=at_start))
    return alternation(*found)


def _lookahead_in(node: Node) -> Lookahead | None:
    match node:
        case Lookahead():
            return node
        case Concat(items) | Alternation(items):
            for item in items:
                found = None if type(item) in _LEAVES else _lookahead_in(item)
                if found is not None:
                    return found
        case Repeat(item, _, _):
            return _lookahead_in(item)
    return None


# -- anchors ---------------------------------------------------------------------------------------------------


def split(node: Node) -> list[tuple[bool, Node, bool]]:
    """Return the alternatives of `node` without anchors: bound to the start, the alternative, bound to the end.

    Raises GrammarError for an anchor that does not stand at an end of its alternative.
    """
    parts = [
        (at_start, inner, at_end)
        for at_start, body in _peel(node, "^")
        for at_end, inner in _peel(body, "$")
        if inner != NOTHING
    ]
    for _, inner, _ in parts:
        left = _anchor_in(inner, "^$")
        if left is not None:
            _fail(
                int(left.name[1:]),
                f"{left.name[0]!r} is supported at the ends of the pattern and of its alternatives only; "
                "leave it out or move it there",
            )
    return parts


def _peel(node: Node, sign: str) -> list[tuple[bool, Node]]:
    """Return alternatives of `node` without the anchors at one end: whether there was one, and the rest."""
    check()
    if isinstance(node, Rule) and node.name[0] == sign:
        return [(True, EMPTY)]
    if _anchor_in(node, sign) is None:
        return [(False, node)]
    match node:
        case Alternation(items):
            return list(dict.fromkeys(part for item in items for part in _peel(item, sign)))
        case Repeat(item, 0, 1):
            return [*_peel(item, sign), (False, EMPTY)]
        case Concat(items):
            return _peel_sequence(items, sign)
    return [(False, node)]


def _peel_sequence(items: tuple[Node, ...], sign: str) -> list[tuple[bool, Node]]:
    num_looks = next((i for i, item in enumerate(items) if not isinstance(item, Lookahead)), len(items))
    num_looks *= sign == "^"  # a lookahead and a ^ behind it are at the same position
    edge, others = (items[num_looks], items[num_looks + 1 :]) if sign == "^" else (items[-1], items[:-1])
    further = _peel(concat(*others), sign)
    parts: list[tuple[bool, Node]] = []
    for found, inner in _peel(edge, sign):
        if isinstance(inner, Empty):  # the next item is now at the end
            parts += [(found or again, rest) for again, rest in further]
        else:
            parts.append((found, concat(inner, *others) if sign == "^" else concat(*others, inner)))
    return list(dict.fromkeys((found, concat(*items[:num_looks], rest)) for found, rest in parts))


def _anchor_in(node: Node, signs: str) -> Rule | None:
    match node:
        case Rule(name) if name[0] in signs:
            return node
        case Concat(items) | Alternation(items):
            for item in items:
                found = None if type(item) in _LEAVES else _anchor_in(item, signs)
                if found is not None:
                    return found
        case Repeat(item, _, _):
            return _anchor_in(item, signs)
    return None


# -- boundaries of words ---------------------------------------------------------------------------------------


def with_boundary(
    items: list[Node], position: int, *, is_first: bool, search: bool, wide: bool | None, ascii_only: bool
) -> list[Node]:
    r"""Return `items`, a sequence, with a \b at its end.

    is_first  whether the sequence begins a whole alternative of the pattern.
    search    whether any text may stand before the pattern.
    wide      whether characters that are letters in one dialect only count as letters; None for Python's letters.

    Raises GrammarError if the character before the \b does not decide.
    """
    word, other = _word_characters(wide, ascii_only)
    starts = Lookahead(char_set(word), False, position)
    ends = Lookahead(char_set(complement(other)), True, position)
    num_before = next((i + 1 for i in reversed(range(len(items))) if not isinstance(items[i], Lookahead)), 0)
    looks, before = items[num_before:], items[:num_before]
    if not before and is_first:
        first: list[Node] = [concat(start_anchor(position), *looks, starts)]
        if search:
            first += [concat(char_set(other), *looks, starts), concat(char_set(word), *looks, ends)]
        return [alternation(*first)]
    if before and isinstance(before[-1], Rule) and before[-1].name[0] == "^":
        return [*items, starts]
    in_word, in_other = (_ending_in(before[-1], ranges) if before else None for ranges in (word, other))
    if in_word is None or in_other is None:
        _fail(
            position,
            r"\b is supported at the start of the pattern and after a character or class; "
            "write the characters out that may stand beside it",
        )
    return [*before[:-1], alternation(concat(in_word, *looks, ends), concat(in_other, *looks, starts))]


def _word_characters(wide: bool | None, ascii_only: bool) -> tuple[tuple[Range, ...], tuple[Range, ...]]:
    """Return the characters that belong to words, and those that do not."""
    if wide is None:
        word = charsets.category("w", ascii_only)
        return word, complement(word)
    sure, maybe = (charsets.portable_category("w", wide=way) for way in (False, True))
    maybe = complement(intersect(_PLAIN, complement(maybe)))
    return (maybe, complement(sure)) if wide else (sure, complement(maybe))


def _ending_in(node: Node, ranges: tuple[Range, ...]) -> Node | None:
    """Return `node` with its last character in `ranges`; None if it may be empty or ends in more than characters."""
    match node:
        case CharSet(own):
            return char_set(intersect(own, ranges))
        case Literal(data):
            last = ord(data.decode()[-1])
            return node if any(low <= last <= high for low, high in ranges) else NOTHING
        case Repeat(item, low, high) if low > 0:
            end = _ending_in(item, ranges)
            return None if end is None else concat(repeat(item, low - 1, None if high is None else high - 1), end)
        case Concat(items):
            end = _ending_in(items[-1], ranges)
            return None if end is None else concat(*items[:-1], end)
        case Alternation(items):
            ways = [_ending_in(item, ranges) for item in items]
            kept = [way for way in ways if way is not None]
            return alternation(*kept) if len(kept) == len(ways) else None
    return None


# -- repeats beside free text ----------------------------------------------------------------------------------


def trimmed(node: Node, *, start: bool, end: bool) -> Node:
    """Return a smaller node for `node` if any text may stand before it (`start`), or after it (`end`).

    A repeat at a free end needs its minimum only: `[a-z][a-z0-9]{1,128}` is found wherever `[a-z][a-z0-9]` is, in 3
    states instead of thousands.
    """
    node = _trimmed(node, at=-1) if end else node
    return _trimmed(node, at=0) if start else node


def _trimmed(node: Node, at: int) -> Node:
    """Return `node` with fewer items at this end."""
    match node:
        case Concat(items):
            left = list(items)
            while left:
                edge = left[at] = _trimmed(left[at], at)
                if edge != EMPTY:
                    break
                del left[at]
            return concat(*left)
        case Alternation(items):
            ways = [_trimmed(item, at) for item in items]
            return EMPTY if EMPTY in ways else alternation(*ways)
        case Repeat(item, low, _):
            if low == 0:
                return EMPTY
            edge = _trimmed(item, at)
            if edge == item:
                return repeat(item, low, low)
            rest = repeat(item, low - 1, low - 1)
            return concat(rest, edge) if at else concat(edge, rest)
        case Rule():
            return node  # an anchor or a lookahead
    return EMPTY if nullable(node) else node


def _fail(position: int, reason: str) -> NoReturn:
    raise GrammarError(f"regex, position {position}: {reason}", position=position)
