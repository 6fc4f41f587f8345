"""Whether a node matches a text, told by the node itself: few texts are not worth its automaton."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from graftlm.core.grammar.automata.products import product
from graftlm.core.grammar.nodes import nodes
from graftlm.core.grammar.nodes.nodes import Node


def matches(node: Node, text: str) -> bool:
    """Whether `node`, which is regular, matches the whole of `text`. For many texts `product.matches` is faster."""
    return len(text) in _ends(node, text, frozenset({0}))


def _ends(node: Node, text: str, starts: AbstractSet[int]) -> AbstractSet[int]:
    """The ends, in characters of `text`, of all texts of `node` that begin at one of `starts`."""
    match node:
        case nodes.Literal(data):
            word = data.decode()
            return {start + len(word) for start in starts if text.startswith(word, start)}
        case nodes.CharSet(ranges):
            codes = [(start, ord(text[start])) for start in starts if start < len(text)]
            return {start + 1 for start, code in codes if any(low <= code <= high for low, high in ranges)}
        case nodes.Concat(items):
            for item in items:
                starts = _ends(item, text, starts)
                if not starts:
                    break
            return starts
        case nodes.Alternation(items):
            return frozenset().union(*(_ends(item, text, starts) for item in items))
        case nodes.Repeat():
            return _repeated(node, text, starts)
        case nodes.Graph():
            return _walked(node, text, starts)
        case nodes.Intersection(items):
            each = [[_ends(item, text, {start}) for item in items] for start in starts]
            return frozenset().union(*(frozenset(found[0]).intersection(*found[1:]) for found in each))
        case nodes.Difference(item, minus):
            return frozenset().union(*(_ends(item, text, {start}) - _ends(minus, text, {start}) for start in starts))
        case nodes.Automaton():
            table, rest = product.table(node), [(start, end) for start in starts for end in range(start, len(text) + 1)]
            return {end for start, end in rest if table.accepts(text[start:end].encode())}
        case nodes.Empty():
            return starts
        case _:
            raise AssertionError(node)


def _repeated(node: nodes.Repeat, text: str, starts: AbstractSet[int]) -> AbstractSet[int]:
    for _ in range(node.min):
        before, starts = starts, _ends(node.item, text, starts)
        if starts == before or not starts:
            break
    found, fresh = set(starts), starts
    left = None if node.max is None else node.max - node.min
    while fresh and left != 0:  # with fewer times behind it, a place allows for more
        fresh = _ends(node.item, text, fresh) - found
        found |= fresh
        left = None if left is None else left - 1
    return found


def _walked(node: nodes.Graph, text: str, starts: AbstractSet[int]) -> AbstractSet[int]:
    reached: list[set[int]] = [set() for _ in node.rows]
    work: list[tuple[int, AbstractSet[int]]] = [(0, starts)]
    while work:
        state, places = work.pop()
        fresh = places - reached[state]
        if fresh:
            reached[state] |= fresh
            work += [(target, _ends(item, text, fresh)) for item, target in node.rows[state]]
    return frozenset().union(*(reached[state] for state in node.accepting))
