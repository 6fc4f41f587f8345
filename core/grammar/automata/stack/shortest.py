"""The shortest text of a node with rules, and of what is left of one."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from graftlm.core.grammar.ast import (
    Alternation,
    Automaton,
    CharSet,
    Concat,
    Difference,
    Empty,
    Graph,
    Intersection,
    Literal,
    Node,
    Range,
    Repeat,
    Rule,
)
from graftlm.core.grammar.automata.stack.positions import END, INFINITE, Positions, Product, Rest
from graftlm.core.grammar.automata.stack.product_endings import ProductEndings
from graftlm.core.grammar.automata.utf8 import byte_graph
from graftlm.core.grammar.budget import check

_MAX_OPEN = 32
"""Rules that are measured inside one another; one further in waits for the next round."""


class ShortestTexts:
    """Lengths in bytes of the shortest texts of nodes; INFINITE where there is none. `rules` are those nodes may name.

    A rule is measured after those that it names. What contains itself counts as INFINITE first, and what depends on it
    is measured again, by rounds, until nothing shrinks: Knuth's generalisation of Dijkstra's algorithm.
    """

    def __init__(
        self, rules: Mapping[str, Node], positions: Positions | None = None, known: Mapping[str, int] | None = None
    ) -> None:
        """Measure the rules not in `known`. Without `positions` products are not walked: they count as no bytes.

        known  the lengths of some rules, which name no others than those in it
        """
        self._rules = rules
        self._positions = positions
        self.of_rule = dict(known or {})
        self._in_doubt: dict[str, None] = {}  # rules that may still shrink
        self._num_open = 0  # of them are being measured for the first time
        self._is_sure = True  # nothing that was measured since this was set depends on such a rule
        self._lengths: dict[int, int] = {}
        self._doubtful_lengths: dict[int, int] = {}  # of nodes that depend on one, in this round
        self._ways: dict[int, list[int]] = {}
        self._texts: dict[str, bytes] = {}
        self._kept: list[Node] = []
        self._products: dict[Product, ProductEndings] = {}
        for name in rules:
            if name not in self.of_rule:
                check()
                self._measure(name)
                self._settle()
        self._lengths.clear()
        self._ways.clear()
        self._kept.clear()

    def _measure(self, name: str) -> None:
        self.of_rule[name] = INFINITE
        self._in_doubt[name] = None
        self._num_open += 1
        was_sure, self._is_sure = self._is_sure, True
        self.of_rule[name] = self.length(self._rules[name])
        if self._is_sure:
            del self._in_doubt[name]
        self._is_sure = was_sure
        self._num_open -= 1

    def _settle(self) -> None:
        """Measure the rules in doubt, the last ones met first, until none of them shrinks and no more are met."""
        settled = not self._in_doubt
        while not settled:
            check()
            self._doubtful_lengths.clear()
            names, settled = list(reversed(self._in_doubt)), True
            for name in names:
                found = self.length(self._rules[name])
                if found < self.of_rule[name]:
                    self.of_rule[name] = found
                    settled = False
            settled = settled and len(self._in_doubt) == len(names)
        self._doubtful_lengths.clear()
        self._in_doubt.clear()
        self._is_sure = True

    def _of_rule(self, name: str) -> int:
        found = self.of_rule.get(name)
        if found is None:
            if self._num_open < _MAX_OPEN:
                self._measure(name)
            else:
                self.of_rule[name] = INFINITE
                self._in_doubt[name] = None
            found = self.of_rule[name]
        if name in self._in_doubt:
            self._is_sure = False
        return found

    def length(self, node: Node) -> int:
        """Bytes of the shortest text of `node`."""
        found = self._lengths.get(id(node))
        if found is None and self._in_doubt:
            found = self._doubtful_lengths.get(id(node))
            if found is not None:
                self._is_sure = False
        if found is None:
            was_sure, self._is_sure = self._is_sure, True
            found = min(self._length(node), INFINITE)
            (self._lengths if self._is_sure else self._doubtful_lengths)[id(node)] = found
            self._is_sure &= was_sure
            self._kept.append(node)  # so that its id stays its own
        return found

    def _length(self, node: Node) -> int:
        match node:
            case Rule(name):
                return self._of_rule(name)
            case Literal(data):
                return len(data)
            case CharSet(ranges):
                return len(_spelled(ranges)) or INFINITE
            case Concat(items):
                return sum(map(self.length, items))
            case Alternation(items):
                return min(map(self.length, items), default=INFINITE)
            case Repeat(item, low, _):
                return low * self.length(item) if low else 0
            case Graph() | Automaton():
                return 0 if 0 in node.accepting else self.ways(node)[0]
            case Intersection() | Difference():
                return self._product(node, 0)
            case Empty():
                return 0

    def _product(self, node: Intersection | Difference, state: int) -> int:
        if self._positions is None:
            return 0
        text = self._ending(node, state)
        return INFINITE if text is None else len(text)

    def _ending(self, node: Intersection | Difference, state: int) -> bytes | None:
        assert self._positions is not None
        product = self._positions.product(node)
        found = self._products.get(product)
        if found is None:
            texts = ShortestTexts({}, product.positions)
            found = self._products[product] = ProductEndings(product, texts.left, texts.text)
        return found.of(state)

    def ways(self, node: Graph | Automaton) -> list[int]:
        """For each state the bytes of the shortest way to the end."""
        found = self._ways.get(id(node))
        if found is None:
            was_sure, self._is_sure = self._is_sure, True
            edges: list[list[tuple[int, int]]]
            if isinstance(node, Automaton):
                edges = [[(1, target) for _, _, target in row] for row in node.rows]
            else:
                edges = [[(self.length(item), target) for item, target in row] for row in node.rows]
            found = _distances(edges, node.accepting)
            if self._is_sure:
                self._ways[id(node)] = found
                self._kept.append(node)
            self._is_sure &= was_sure
        return found

    def left(self, rest: Rest) -> int:
        """Bytes of the shortest way through `rest`, one of those of `positions`."""
        assert self._positions is not None
        distances, nexts = self._positions.distances, self._positions.nexts
        chain = []
        while distances[rest] < 0:
            chain.append(rest)
            rest = nexts[rest]
        total = distances[rest]
        for here in reversed(chain):
            total = distances[here] = min(total + self._own(self._positions, here), INFINITE)
        return total

    def _own(self, positions: Positions, rest: Rest) -> int:
        node, index = positions.nodes[rest], positions.indices[rest]
        match node:
            case Literal(data):
                return len(data) - index
            case Concat(items):
                return sum(map(self.length, items[index:]))
            case Repeat(item, low, _):
                return (low - index) * self.length(item) if index < low else 0
            case Graph() | Automaton():
                return self.ways(node)[index]
            case Intersection() | Difference():
                return self._product(node, index)
            case CharSet(ranges):
                return len(_spelled(ranges, index)) or INFINITE
            case _:
                return self.length(node)

    def text(self, rest: Rest) -> bytes:
        """The shortest way through `rest`."""
        assert self._positions is not None
        data = bytearray()
        while rest != END:
            data += self._text(self._positions.nodes[rest], self._positions.indices[rest])
            rest = self._positions.nexts[rest]
        return bytes(data)

    def _text(self, node: Node, index: int = 0) -> bytes:
        match node:
            case Literal(data):
                return data[index:]
            case CharSet(ranges):
                return _spelled(ranges, index)
            case Concat(items):
                return b"".join(map(self._text, items[index:]))
            case Alternation(items):
                return self._text(min(items, key=self.length))
            case Repeat(item, low, _):
                return self._text(item) * (low - index) if index < low else b""
            case Graph(rows):
                written, ways = bytearray(), self.ways(node)
                while ways[index]:
                    lengths = [(self.length(item) + ways[target], ways[target]) for item, target in rows[index]]
                    item, index = rows[index][lengths.index(min(lengths))]
                    written += self._text(item)
                return bytes(written)
            case Automaton(rows):
                written, ways = bytearray(), self.ways(node)
                while ways[index]:
                    low, _, index = min(rows[index], key=lambda edge: ways[edge[2]])
                    written.append(low)
                return bytes(written)
            case Intersection() | Difference():
                return self._ending(node, index) or b""
            case Rule(name):
                if name not in self._texts:
                    self._texts[name] = self._text(self._rules[name])
                return self._texts[name]
            case Empty():
                return b""


def _distances(edges: list[list[tuple[int, int]]], accepting: frozenset[int]) -> list[int]:
    distances = [0 if state in accepting else INFINITE for state in range(len(edges))]
    changed = True
    while changed:  # states are numbered about in the order of reading: backwards, one sweep settles most of them
        changed = False
        for state in range(len(edges) - 1, -1, -1):
            best = min((cost + distances[target] for cost, target in edges[state]), default=INFINITE)
            if best < distances[state]:
                distances[state] = best
                changed = True
    return distances


@lru_cache(maxsize=4096)
def _spelled(ranges: tuple[Range, ...], state: int = 0) -> bytes:
    """The bytes of the shortest character from a state of its graph on; none if there is no character."""
    graph = byte_graph(ranges)
    data = bytearray()
    while state != 1 and graph.sources:
        edge = graph.sources.index(state)
        data.append(graph.lows[edge])
        state = graph.targets[edge]
    return bytes(data)
