"""Anchors and lookaheads of a regex: what may surround a match, and what may follow a place in it."""

from __future__ import annotations

from collections.abc import Callable

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.ast import (
    ANY_CHAR,
    EMPTY,
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
    optional,
    plus,
    repeat,
    star,
)

# While a pattern is parsed, an anchor is a rule named "^" or "$" and its position, and so is a lookahead.


class Lookahead(Rule):
    """A place that a text of `body` must follow or, with `refused`, must not follow."""

    __slots__ = ("body", "refused")
    body: Node
    refused: bool

    def __init__(self, body: Node, refused: bool, position: int) -> None:
        super().__init__(f"?{position}")
        object.__setattr__(self, "body", body)
        object.__setattr__(self, "refused", refused)


def start_anchor(position: int) -> Node:
    return Rule(f"^{position}")


def end_anchor(position: int) -> Node:
    return Rule(f"${position}")


def is_anchor(node: Node) -> bool:
    return isinstance(node, Rule)


def sorted_anchors(items: list[Node]) -> list[Node]:
    """`items` with each `^` before the lookaheads that stand directly before it: neither takes any text."""
    for i in range(1, len(items)):
        at, item = i, items[i]
        while at and isinstance(item, Rule) and item.name[0] == "^" and isinstance(items[at - 1], Lookahead):
            items[at - 1], items[at] = item, items[at - 1]
            at -= 1
    return items


def anchored(node: Node) -> Node:
    """The texts that `node` matches from end to end."""
    return alternation(*(_look(body, EMPTY) for _, body, _ in _split(node)))


def found_anywhere(node: Node, *, wide: bool = False) -> Node:
    """The texts that contain a match of `node`, at the ends where anchors say so.

    wide  as in dialects where `$` also matches before a line break that ends the text.
    """
    around, end = star(ANY_CHAR), optional(literal("\n")) if wide else EMPTY
    return alternation(
        *(
            concat(EMPTY if at_start else around, _look(body, end if at_end else around))
            for at_start, body, at_end in _split(node)
        )
    )


def _look(node: Node, rest: Node) -> Node:
    """`node` and then `rest`, the end of the text, with the lookaheads in `node` applied to what follows them."""
    ahead = _lookahead_in(node)
    if ahead is None:
        return concat(node, rest)
    match node:
        case Lookahead():
            around = star(ANY_CHAR)
            wanted = alternation(*(_look(body, EMPTY if ends else around) for _, body, ends in _split(node.body)))
            return Difference(rest, wanted) if node.refused else Intersection((rest, wanted))
        case Concat(items):
            for item in reversed(items):
                rest = _look(item, rest)
            return rest
        case Alternation(items):
            return alternation(*(_look(item, rest) for item in items))
        case Repeat(item, 0, 1):
            return alternation(rest, _look(item, rest))
        case Repeat(Concat((Lookahead(refused=True) as refused, CharSet() as char)), 0 | 1 as least, None) if (
            isinstance(rest, Empty) and _lookahead_in(refused.body) is None
        ):
            # (?:(?!x).)*$ is free of x, wherever it begins
            after = alternation(
                *(_look(body, EMPTY if ends else star(ANY_CHAR)) for _, body, ends in _split(refused.body))
            )
            return Difference(repeat(char, least, None), concat(star(char), Intersection((plus(ANY_CHAR), after))))
    position = int(ahead.name[1:])
    raise GrammarError(
        f"regex, position {position}: a lookahead in a repeat is not regular in general; take it out of the repeat",
        position=position,
    )


def _lookahead_in(node: Node) -> Lookahead | None:
    match node:
        case Lookahead():
            return node
        case Concat(items) | Alternation(items):
            return next((found for item in items if (found := _lookahead_in(item)) is not None), None)
        case Repeat(item, _, _):
            return _lookahead_in(item)
    return None


def _split(node: Node) -> list[tuple[bool, Node, bool]]:
    """Alternatives without anchors: bound to the start, the alternative, bound to the end."""
    parts = [
        (at_start, inner, at_end)
        for at_start, body in _peel(node, "^", _first)
        for at_end, inner in _peel(body, "$", _last)
    ]
    for _, inner, _ in parts:
        found = _anchor_in(inner)
        if found is not None:
            position = int(found.name[1:])
            raise GrammarError(
                f"regex, position {position}: {found.name[0]!r} holds at the ends of the pattern only; "
                "leave it out or move it there",
                position=position,
            )
    return parts


def _first(items: tuple[Node, ...]) -> tuple[Node, Callable[[Node], Node], Node]:
    """The outermost item, how to put something in its place, and what is left without it."""
    return items[0], lambda node: concat(node, *items[1:]), concat(*items[1:])


def _last(items: tuple[Node, ...]) -> tuple[Node, Callable[[Node], Node], Node]:
    return items[-1], lambda node: concat(*items[:-1], node), concat(*items[:-1])


def _peel(
    node: Node, sign: str, outermost: Callable[[tuple[Node, ...]], tuple[Node, Callable[[Node], Node], Node]]
) -> list[tuple[bool, Node]]:
    """Alternatives of `node` without the anchors at one end: whether there was one, and the rest."""
    if isinstance(node, Rule) and node.name[0] == sign:
        return [(True, EMPTY)]
    if _anchor_in(node) is None:
        return [(False, node)]
    match node:
        case Alternation(items):
            return [part for item in items for part in _peel(item, sign, outermost)]
        case Repeat(item, 0, 1):
            return [*_peel(item, sign, outermost), (False, EMPTY)]
        case Concat(items):
            edge, replaced, others = outermost(items)
            parts: list[tuple[bool, Node]] = []
            for found, inner in _peel(edge, sign, outermost):
                if isinstance(inner, Empty):  # the next item is now at the end
                    parts += [(found or further, rest) for further, rest in _peel(others, sign, outermost)]
                else:
                    parts.append((found, replaced(inner)))
            return parts
    return [(False, node)]


def _anchor_in(node: Node) -> Rule | None:
    match node:
        case Rule(name) if name[0] != "?":
            return node
        case Concat(items) | Alternation(items):
            return next((found for item in items if (found := _anchor_in(item)) is not None), None)
        case Repeat(item, _, _):
            return _anchor_in(item)
    return None
