"""Alternatives of which one is an automaton without a short regex: others that begin alike become one with it.

llguidance's lexer takes the longest text of a terminal, and the rules of an automaton's states read byte by byte.
Beside each other, in `T0|s1`, they lose texts that both begin: where numbers may be multiples of 10, or any but those
of 0.5, 640 was no text, and 64 could not end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from graftlm.core.errors import GrammarError
from graftlm.core.grammar import ast
from graftlm.core.grammar.ast import Node
from graftlm.core.grammar.automata.products.letters import letters
from graftlm.core.grammar.automata.products.product import product

_MAX_STATES = 1_000
"""States of what becomes one: each is a rule."""
_FOLLOWED, _MAX_NAMES = 1, 4
"""How deep alternatives may be alternatives themselves, and how many names such a one may have."""


def as_one(items: Sequence[Node], rules: Mapping[str, Node], is_regular: Callable[[Node], bool]) -> Sequence[Node]:
    """`items` with one automaton in place of those that begin alike, if an automaton without a regex is among them."""
    if not any([type(item) in _OPENED or type(item) in _AUTOMATA for item in items]):
        return items
    ways = list[tuple[Node, Node]]()
    _add_ways(ways, items, rules, _FOLLOWED)
    automata = [body for _, body in ways if type(body) in _AUTOMATA and not is_regular(body)]
    if not automata:
        return items
    first = ast.normalise([one for body in automata for one in _first(body)])
    others, together = list[Node](), list[Node]()
    for way, body in ways:
        if body in automata or is_regular(body) and ast.intersect(ast.normalise(list(_first(body))), first):
            together.append(body)
        else:
            others.append(way)
    if len(together) < 2:
        return items
    try:
        found = product(ast.alternation(*together))
    except GrammarError:  # too large
        return items
    return [*others, found] if len(found.rows) <= _MAX_STATES else items


_AUTOMATA = frozenset({ast.Automaton, ast.Intersection, ast.Difference})
_OPENED = frozenset({ast.Rule, ast.Alternation})


def _add_ways(ways: list[tuple[Node, Node]], items: Iterable[Node], rules: Mapping[str, Node], depth: int) -> None:
    """Add the alternatives, also those of rules and of alternatives; each with what it is where it is a rule."""
    for item in items:
        body = item
        for _ in range(_MAX_NAMES):
            if type(body) is not ast.Rule:
                break
            body = rules.get(body.name, body)
        if type(body) is ast.Alternation and depth:
            _add_ways(ways, body.items, rules, depth - 1)
        else:
            ways.append((item, body))


def _first(body: Node) -> Sequence[ast.Range]:
    """The characters that a text may begin with, all where that is not known."""
    if isinstance(body, ast.Intersection | ast.Difference):
        return _first(body.items[0] if isinstance(body, ast.Intersection) else body.item)
    if isinstance(body, ast.Automaton):
        return [(low, high) for low, high, _ in body.rows[0]] if body.rows else ()
    return letters(body).first
