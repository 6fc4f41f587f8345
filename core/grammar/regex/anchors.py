"""Anchors of a regex: at its ends they decide what may surround a match; elsewhere they are refused."""

from __future__ import annotations

from collections.abc import Callable

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.ast import (
    ANY_CHAR,
    EMPTY,
    Alternation,
    Concat,
    Empty,
    Node,
    Repeat,
    Rule,
    alternation,
    concat,
    star,
)

# While a pattern is parsed, an anchor is a rule named "^" or "$" and its position.


def start_anchor(position: int) -> Node:
    return Rule(f"^{position}")


def end_anchor(position: int) -> Node:
    return Rule(f"${position}")


def is_anchor(node: Node) -> bool:
    return isinstance(node, Rule)


def anchored(node: Node) -> Node:
    """The texts that `node` matches from end to end."""
    return alternation(*(body for _, body, _ in _split(node)))


def found_anywhere(node: Node) -> Node:
    """The texts that contain a match of `node`, at the ends where anchors say so."""
    around = star(ANY_CHAR)
    return alternation(
        *(
            concat(EMPTY if at_start else around, body, EMPTY if at_end else around)
            for at_start, body, at_end in _split(node)
        )
    )


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
        case Rule():
            return node
        case Concat(items) | Alternation(items):
            return next((found for item in items if (found := _anchor_in(item)) is not None), None)
        case Repeat(item, _, _):
            return _anchor_in(item)
    return None
