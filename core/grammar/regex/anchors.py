"""Anchors and lookaheads of a regex: what may surround a match, and what may follow a place in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.ast import (
    ANY_CHAR,
    EMPTY,
    NOTHING,
    Alternation,
    CharSet,
    Concat,
    Difference,
    Empty,
    Intersection,
    Node,
    Repeat,
    Rule,
    alternation,
    concat,
    literal,
    nullable,
    optional,
    plus,
    repeat,
    star,
)
from graftlm.core.grammar.regex.backreferences import Captured
from graftlm.core.grammar.regex.lookarounds import CHARACTERS, Lookahead
from graftlm.core.grammar.regex.trimming import trimmed

# While a pattern is parsed, an anchor is a rule named "^" or "$" and its position, and so is a lookahead.


class InThreadsError(Exception):
    """The pattern has a lookahead or an anchor that only `threads.language` keeps.

    useless  the error that says so if the anchor lets nothing match
    """

    useless: GrammarError | None = None


def start_anchor(position: int) -> Node:
    return Rule(f"^{position}")


def end_anchor(position: int) -> Node:
    return Rule(f"${position}")


def is_place(node: Node) -> bool:
    """Whether `node` is an anchor or a lookaround, which take no text."""
    return isinstance(node, Rule) and not isinstance(node, Captured)


def is_bound(node: Node) -> bool:
    """Whether `node` begins and ends with anchors, whatever it matches."""
    match node:
        case Alternation(items):
            return all(map(is_bound, items))
        case Concat(items):
            return _is_anchor(items[0], "^") and _is_anchor(items[-1], "$~")
    return False


def _is_anchor(node: Node, signs: str) -> bool:
    return isinstance(node, Rule) and node.name[0] in signs


def sorted_anchors(items: list[Node]) -> list[Node]:
    """`items`, groups taken apart, with each `^` before the lookaheads that stand directly before it: neither takes any
    text.
    """
    items = [part for item in items for part in (item.items if isinstance(item, Concat) else (item,))]
    for i in range(1, len(items)):
        at, item = i, items[i]
        while at and isinstance(item, Rule) and item.name[0] == "^" and isinstance(items[at - 1], Lookahead):
            items[at - 1], items[at] = item, items[at - 1]
            at -= 1
    return items


def anchored(node: Node) -> Node:
    """The texts that `node` matches from end to end. Raises InThreadsError."""
    return alternation(*(_look(body, EMPTY, True) for _, body, _ in split(node)))


def found_anywhere(node: Node, *, wide: bool = False) -> Node:
    """The texts that contain a match of `node`, at the ends where anchors say so.

    wide  as in dialects where `$` also matches before a line break that ends the text.
    Raises InThreadsError.
    """
    around, end = star(ANY_CHAR), optional(literal("\n")) if wide else EMPTY
    # alternatives share the text around them: with texts of their own, an automaton keeps which of them matched
    plain: dict[bool, tuple[list[Node], list[Node]]] = {}  # by whether they end the text: those that begin it, others
    found = []
    for at_start, body, at_end in split(node):
        if _lookahead_in(body) is None:
            body = trimmed(body, start=not at_start, end=not at_end)
            plain.setdefault(at_end, ([], []))[not at_start].append(body)
            continue
        rest = end if at_end else around
        if at_start or _asks_for_start(body):
            found.append(_look(body, rest, True))
        if not at_start:
            before = plus(ANY_CHAR) if _asks_for_start(body) else around
            found.append(concat(before, _look(body, rest, False)))
    for at_end, (first, anywhere) in plain.items():
        inside = [concat(around, alternation(*anywhere))] if anywhere else []
        found.append(concat(alternation(*first, *inside), end if at_end else around))
    return alternation(*found)


def _look(node: Node, rest: Node, at_start: bool | None) -> Node:
    """`node` and then `rest`, the end of the text, with the lookaheads in `node` applied to what follows them.

    at_start  whether the text begins with `node`; None where that depends on what was matched before it.
    """
    if _lookahead_in(node) is None:
        return concat(node, rest)
    match node:
        case Lookahead():
            wanted = _wanted(node, at_start)
            return Difference(rest, wanted) if node.refused else Intersection((rest, wanted))
        case Concat(items):
            for item, begins in reversed(list(zip(items, _beginnings(items, at_start), strict=True))):
                rest = _look(item, rest, begins)
            return rest
        case Alternation(items):
            return alternation(*(_look(item, rest, at_start) for item in items))
        case Repeat(item, 0, 1):
            return alternation(rest, _look(item, rest, at_start))
        case Repeat(Concat((Lookahead(refused=True) as refused, CharSet() as char)), 0 | 1 as least, None) if (
            isinstance(rest, Empty) and _lookahead_in(refused.body) is None
        ):
            # (?:(?!x).)*$ is free of x, wherever it begins
            after = _wanted(refused, None)
            return Difference(repeat(char, least, None), concat(star(char), Intersection((plus(ANY_CHAR), after))))
    raise InThreadsError


def _wanted(ahead: Lookahead, at_start: bool | None) -> Node:
    """The ends of texts that begin as the lookahead says."""
    around, found = star(ANY_CHAR), []
    for asks_for_start, body, ends in split(ahead.body):
        if asks_for_start and at_start is None:
            raise InThreadsError
        if at_start or not asks_for_start:
            end = optional(literal("\n")) if ahead.wide else EMPTY
            found.append(_look(body, end if ends else around, at_start))
    return alternation(*found)


def _beginnings(items: tuple[Node, ...], at_start: bool | None) -> list[bool | None]:
    """For each item whether the text begins with it, as in `_look`."""
    found = []
    for item in items:
        found.append(at_start)
        if at_start is not False and not isinstance(item, Lookahead):
            at_start = None if _without_text(item) is not None else False
    return found


def _asks_for_start(node: Node) -> bool:
    """Whether a lookahead in `node` has a `^`."""
    match node:
        case Lookahead():
            return _anchor_in(node.body, "^") is not None or _asks_for_start(node.body)
        case Concat(items) | Alternation(items):
            return any(_asks_for_start(item) for item in items)
        case Repeat(item, _, _):
            return _asks_for_start(item)
    return False


def _lookahead_in(node: Node) -> Lookahead | None:
    match node:
        case Lookahead():
            return node
        case Concat(items) | Alternation(items):
            for item in items:
                found = None if type(item) in CHARACTERS else _lookahead_in(item)
                if found is not None:
                    return found
        case Repeat(item, _, _):
            return _lookahead_in(item)
    return None


def split(node: Node) -> list[tuple[bool, Node, bool]]:
    """Alternatives without anchors: bound to the start, the alternative, bound to the end. Raises InThreadsError."""
    parts = [
        (at_start, inner, at_end)
        for at_start, body in _peel(node, "^", _first)
        for at_end, inner in _peel(body, "$", _last)
    ]
    kept = [part for part in parts if part[1] != NOTHING]
    # an anchor is left in a repeat, or there is text on both of its sides
    anchors = (_anchor_in(inner, "^$") for _, inner, _ in kept) if kept else iter([_anchor_in(node, "^$")])
    found = next((anchor for anchor in anchors if anchor is not None), None)
    if found is not None:
        position = int(found.name[1:])
        error = InThreadsError()
        error.useless = GrammarError(
            f"regex, position {position}: {found.name[0]!r} holds at the ends of the pattern only; "
            "leave it out or move it there",
            position=position,
        )
        raise error
    return kept


_Outermost: TypeAlias = Callable[[tuple[Node, ...]], tuple[Node, Callable[[Node, Node], Node], Node]]


def _first(items: tuple[Node, ...]) -> tuple[Node, Callable[[Node, Node], Node], Node]:
    """The outermost item, how it goes together with the others, and the others."""
    return items[0], concat, concat(*items[1:])


def _last(items: tuple[Node, ...]) -> tuple[Node, Callable[[Node, Node], Node], Node]:
    return items[-1], lambda edge, others: concat(others, edge), concat(*items[:-1])


def _peel(node: Node, sign: str, outermost: _Outermost) -> list[tuple[bool, Node]]:
    """Alternatives of `node` without the anchors at one end: whether there was one, and the rest."""
    if isinstance(node, Rule) and node.name[0] == sign:
        return [(True, EMPTY)]
    if _anchor_in(node, sign) is None:
        return [(False, node)]
    match node:
        case Alternation(items):
            return [part for item in items for part in _peel(item, sign, outermost)]
        case Repeat(item, 0, 1):
            return [*_peel(item, sign, outermost), (False, EMPTY)]
        case Concat(items):
            edge, put, others = outermost(items)
            parts: list[tuple[bool, Node]] = []
            for found, inner in _peel(edge, sign, outermost):
                if isinstance(inner, Empty):  # the next item is now at the end
                    parts += [(found or further, rest) for further, rest in _peel(others, sign, outermost)]
                    continue
                parts.append((found, put(inner, _without_anchors(others, sign))))
                # anchors behind `inner` hold where it takes no text
                if _anchor_in(others, sign) is not None and (looks := _without_text(inner)) is not None:
                    parts += [
                        (further, put(looks, rest))
                        for further, rest in _peel(others, sign, outermost)
                        if further or _anchor_in(rest, sign) is not None
                    ]
            return parts
    return [(False, node)]


def _without_anchors(node: Node, sign: str) -> Node:
    """The texts of `node` for which no anchor has to hold."""
    match node:
        case Rule(name) if name[0] == sign:
            return NOTHING
        case Concat(items):
            return concat(*(_without_anchors(item, sign) for item in items))
        case Alternation(items):
            return alternation(*(_without_anchors(item, sign) for item in items))
        case Repeat(item, low, high):
            return repeat(_without_anchors(item, sign), low, high)
    return node


def _without_text(node: Node) -> Node | None:
    """The anchors and lookaheads that hold where `node` takes no text; None if it takes some."""
    match node:
        case Rule():
            return node
        case Concat(items):
            looks = [look for item in items if (look := _without_text(item)) is not None]
            return concat(*looks) if len(looks) == len(items) else None
        case Alternation(items):
            looks = [look for item in items if (look := _without_text(item)) is not None]
            return alternation(*looks) if looks else None
        case Repeat(item, low, _):
            return EMPTY if low == 0 else _without_text(item)
    return EMPTY if nullable(node) else None


def _anchor_in(node: Node, signs: str) -> Rule | None:
    if type(node) in CHARACTERS:
        return None
    match node:
        case Rule(name) if name[0] in signs:
            return node
        case Concat(items) | Alternation(items):
            for item in items:
                found = None if type(item) in CHARACTERS else _anchor_in(item, signs)
                if found is not None:
                    return found
        case Repeat(item, _, _):
            return _anchor_in(item, signs)
    return None
