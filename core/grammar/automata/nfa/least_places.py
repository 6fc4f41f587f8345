"""How many places an automaton of a node takes at least, told before it is built: many schemas take far too many."""

from __future__ import annotations

from itertools import pairwise
from os.path import commonprefix

from graftlm.core.errors import GrammarError
from graftlm.core.grammar import ast
from graftlm.core.grammar.ast import Node
from graftlm.core.grammar.automata.nfa.builder import UNROLL_COUNT
from graftlm.core.grammar.automata.utf8 import byte_graph

LONG = 10_000
"""Characters of a schema from which on the places of its automaton are counted before it is built."""
_AROUND_LOOP = 4
"""Places of a counted repeat beside those of what it repeats."""


def check_places(node: Node, most: int, *, counters: bool = True) -> None:
    """Raise the GrammarError of `NfaBuilder(most)` where that is sure to raise it for `node`, which names no rule.

    counters  whether repeats may be counted
    """
    if takes_more_places(node, most, counters=counters):
        raise GrammarError(
            f"the constraint needs more than {most:,} places; make its counted repeats smaller or raise limits.states"
        )


def takes_more_places(node: Node, most: int, *, counters: bool = True) -> bool:
    """Whether an automaton of `node` takes more than `most` places for sure; the count is a lower bound."""
    return _LeastPlaces(counters).of(node) > most


class _LeastPlaces:
    """Counts as the builder adds states: shared nodes in each place. A product is none, whatever comes of it."""

    def __init__(self, counters: bool = True) -> None:
        self._counters = counters
        self._known: dict[int, int] = {}  # by id

    def of(self, node: Node) -> int:
        if isinstance(node, ast.Literal):
            return len(node.data)
        if isinstance(node, ast.CharSet):
            return byte_graph(node.ranges).num_nodes - 1
        found = self._known.get(id(node))
        if found is None:
            found = self._known[id(node)] = self._composed(node)
        return found

    def _composed(self, node: Node) -> int:
        match node:
            case ast.Concat(items):
                return sum(map(self.of, items))
            case ast.Alternation(items):
                words = [item.data for item in items if isinstance(item, ast.Literal)]
                if len(words) <= 2:
                    return 1 + sum(map(self.of, items))
                others = [item for item in items if not isinstance(item, ast.Literal)]
                return 2 + _of_words(words) + sum(map(self.of, others))
            case ast.Repeat(item, minimum, maximum):
                once, count = self.of(item), minimum + 1 if maximum is None else maximum
                unrolled = once * count + 1
                return unrolled if count <= UNROLL_COUNT or not self._counters else min(unrolled, once + _AROUND_LOOP)
            case ast.Graph(rows):
                return len(rows) + 1 + sum([self.of(item) for row in rows for item, _ in row])
            case ast.Automaton():
                return node.num_states + 1
            case _:
                return 0


def _of_words(words: list[bytes]) -> int:
    """Words share what they begin with."""
    in_order = [b"", *sorted(set(words))]
    return sum([len(word) - len(commonprefix((before, word))) for before, word in pairwise(in_order)])
