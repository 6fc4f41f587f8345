"""Positions inside a node: the rest that is left to be written, and the rest after one more byte.

A `Rest` is a node, how far it has been written, and the Rest that comes after it. Rests are made when they are first
needed, so a counted repeat or a long object costs only the places that a text reaches. They are numbers, and what they
stand for lies in lists: Python's collector has nothing to look at, however many a process keeps.
"""

from __future__ import annotations

from typing import TypeAlias

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.ast import (
    EMPTY,
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
    Repeat,
    Rule,
)
from graftlm.core.grammar.automata.utf8 import byte_graph

INFINITE = 1 << 2048  # beyond the shortest text of any schema: definitions that double each other reach 2**40
MAX_STATES = 20_000


class TooManyStates(GrammarError):
    """Texts have led a product to more states than are kept."""


Rest: TypeAlias = int
"""What is left: of a node what comes after an index, then all of the next Rest. A number within its Positions."""

END: Rest = 0
"""Nothing is left."""


class Positions:
    """The Rests of some nodes, each made once. A Rule is a leaf here: whoever meets one has to read its body.

    Of each Rest:

    nodes      the node that it begins in
    indices    of a Literal: bytes written; of a Concat: items; of a Repeat: rounds, as far as they matter; of a
               CharSet, a Graph, an Automaton and a product: the state
    nexts      the Rest after the node; -1 for END
    is_leaf    it reads the next byte, or a rule: of a Concat, its next item does
    distances  bytes of its shortest text; -1 until that is asked for
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = [EMPTY]
        self.indices = [0]
        self.nexts: list[Rest] = [-1]
        self.is_leaf = [True]
        self.distances = [0]
        self._leaves: list[tuple[Rest, ...] | None] = [None]
        self._rests: dict[tuple[int, int, Rest], Rest] = {}
        self._products: dict[Node, Product] = {}
        self._steps: dict[tuple[Rest, int], tuple[Rest, ...]] = {}  # of automata and products

    def rest(self, node: Node, index: int, after: Rest) -> Rest:
        key = (id(node), index, after)
        found = self._rests.get(key)
        if found is None:
            nodes = self.nodes
            first = node.items[index] if isinstance(node, Concat) else node
            self.indices.append(index)
            self.nexts.append(after)
            self.is_leaf.append(isinstance(first, Literal | CharSet) or isinstance(node, Rule))
            self.distances.append(-1)
            self._leaves.append(None)
            nodes.append(node)  # which is kept, so that its id stays its own
            found = self._rests[key] = len(nodes) - 1
        return found

    def product(self, node: Intersection | Difference) -> Product:
        """The automaton of a product, whose states are found as they are asked for."""
        found = self._products.get(node)
        if found is None:
            found = self._products[node] = Product(node)
        return found

    def leaves(self, rest: Rest) -> tuple[Rest, ...]:
        """The Rests that `rest` may go on with, each about to read a byte or a rule; END where it may end."""
        if self.is_leaf[rest]:
            return (rest,)
        leaves = self._leaves[rest]
        if leaves is None:
            found: dict[Rest, None] = {}
            seen = {rest}
            work = [rest]
            while work:
                here = work.pop()
                if self.is_leaf[here] or not self._expand(here, work, seen):
                    found[here] = None
            leaves = self._leaves[rest] = tuple(found)
        return leaves

    def _expand(self, here: Rest, work: list[Rest], seen: set[Rest]) -> bool:
        """Put what `here` may go on with on `work`; False where it reads a byte or a rule itself."""
        node, index, after = self.nodes[here], self.indices[here], self.nexts[here]
        ways: list[Rest]
        is_leaf = False
        if isinstance(node, Concat):
            items = node.items
            last = index == len(items) - 1
            ways = self._ways(items[index], after if last else self.rest(node, index + 1, after))
        elif isinstance(node, Repeat):
            low, high = node.min, node.max
            ways = [after] if index >= low else []
            if high is None or index < high:
                ways += self._ways(
                    node.item, self.rest(node, low if index >= low and high is None else index + 1, after)
                )
        elif isinstance(node, Alternation):
            ways = self._ways(node, after)
        elif isinstance(node, Graph):
            ways = [
                way for item, target in node.rows[index] for way in self._ways(item, self.rest(node, target, after))
            ]
            ways += [after] if index in node.accepting else []
        elif isinstance(node, Automaton):
            is_leaf = True
            ways = [after] if index in node.accepting else []
        elif isinstance(node, Intersection | Difference):
            is_leaf = True
            ways = [after] if self.product(node).accepts(index) else []
        else:
            assert isinstance(node, Empty)
            ways = [after]
        for way in ways:
            if way not in seen:
                seen.add(way)
                work.append(way)
        return not is_leaf

    def _ways(self, node: Node, after: Rest) -> list[Rest]:
        """The beginnings of `node`: of an Alternation those of its items."""
        if isinstance(node, Alternation):
            return [way for item in node.items for way in self._ways(item, after)]
        return [self.rest(node, 0, after)]

    def part(self, leaf: Rest) -> tuple[Node, int]:
        """The node that reads the next byte at a leaf, and how far it was written."""
        node, index = self.nodes[leaf], self.indices[leaf]
        return (node.items[index], 0) if isinstance(node, Concat) else (node, index)

    def literal(self, leaf: Rest, num_bytes: int) -> tuple[Rest, ...]:
        """The leaves after so many more bytes of the Literal that `leaf` reads."""
        node, index = self.part(leaf)
        assert isinstance(node, Literal)
        after, index = self._after(leaf), index + num_bytes
        return self.leaves(after if index == len(node.data) else self.rest(node, index, after))

    def step(self, leaf: Rest, byte: int) -> tuple[Rest, ...]:
        """The leaves after one more byte; none where it is not allowed. A leaf that is a Rule takes no byte."""
        node, index = self.part(leaf)
        if isinstance(node, Literal):
            return self.literal(leaf, 1) if node.data[index] == byte else ()
        if isinstance(node, CharSet):
            target = byte_graph(node.ranges).step(index, byte)
            if target is None:
                return ()
            after = self._after(leaf)
            return self.leaves(after if target == 1 else self.rest(node, target, after))
        key = (leaf, byte)
        found = self._steps.get(key)
        if found is None:
            found = self._steps[key] = self._step(leaf, byte)
        return found

    def _step(self, leaf: Rest, byte: int) -> tuple[Rest, ...]:
        node, index = self.nodes[leaf], self.indices[leaf]
        if isinstance(node, Automaton):
            for low, high, target in node.rows[index]:
                if low <= byte <= high:
                    return self.leaves(self.rest(node, target, self._after(leaf)))
        elif isinstance(node, Intersection | Difference):
            state = self.product(node).step(index, byte)
            if state is not None:
                return self.leaves(self.rest(node, state, self._after(leaf)))
        return ()

    def _after(self, leaf: Rest) -> Rest:
        """What is left once the leaf's own part is read."""
        node, index = self.nodes[leaf], self.indices[leaf]
        if isinstance(node, Concat) and index + 1 < len(node.items):
            return self.rest(node, index + 1, self.nexts[leaf])
        return self.nexts[leaf]

    def cuts(self, leaf: Rest) -> set[int]:
        """The first byte of each kind that a leaf tells apart; 256 stands for the end of the last."""
        node, index = self.part(leaf)
        match node:
            case Intersection() | Difference():
                return self.product(node).cuts(index)
            case Literal(data):
                return {data[index], data[index] + 1}
            case CharSet(ranges):
                graph = byte_graph(ranges)
                edges = [i for i, source in enumerate(graph.sources) if source == index]
                return {cut for i in edges for cut in (graph.lows[i], graph.highs[i] + 1)}
            case Automaton(rows):
                return {cut for low, high, _ in rows[index] for cut in (low, high + 1)}
            case _:
                return set()


class Product:
    """The automaton of an Intersection or a Difference; a state is a set of Rests for each part, 0 is the start.

    node       what it is the automaton of
    positions  those of the parts
    """

    def __init__(self, node: Intersection | Difference) -> None:
        self.node = node
        self._is_difference = isinstance(node, Difference)
        parts = (node.item, node.minus) if isinstance(node, Difference) else node.items
        self.positions = Positions()
        starts = tuple(frozenset(self.positions.leaves(self.positions.rest(part, 0, END))) for part in parts)
        self._states = [starts]
        self._numbers = {starts: 0}
        self._steps: dict[tuple[int, int], int | None] = {}

    def accepts(self, state: int) -> bool:
        ends = [END in part for part in self._states[state]]
        return ends[0] and not any(ends[1:]) if self._is_difference else all(ends)

    def kept(self, state: int) -> tuple[frozenset[Rest], ...]:
        """The Rests that a text may go on with, for each part that it has to be in."""
        parts = self._states[state]
        return parts[:1] if self._is_difference else parts

    def passes(self, state: int, data: bytes, part: int) -> bool:
        """Whether `data`, which ends a text of one part, ends one of the product."""
        for i, rests in enumerate(self._states[state]):
            if i != part:
                for byte in data:
                    rests = frozenset(new for leaf in rests for new in self.positions.step(leaf, byte))
                if (END in rests) == (self._is_difference and i > 0):
                    return False
        return True

    def step(self, state: int, byte: int) -> int | None:
        key = (state, byte)
        if key not in self._steps:
            step = self.positions.step
            after = tuple(frozenset(new for leaf in part for new in step(leaf, byte)) for part in self._states[state])
            dead = not after[0] if self._is_difference else not all(after)
            self._steps[key] = None if dead else self._number(after)
        return self._steps[key]

    def _number(self, parts: tuple[frozenset[Rest], ...]) -> int:
        if parts not in self._numbers:
            if len(self._states) >= MAX_STATES:
                raise TooManyStates(
                    f"a combination of patterns needs more than {MAX_STATES:,} states; use fewer at once"
                )
            self._numbers[parts] = len(self._states)
            self._states.append(parts)
        return self._numbers[parts]

    def cuts(self, state: int) -> set[int]:
        """The first byte of each kind that a state tells apart."""
        leaves = {leaf for part in self._states[state] for leaf in part}
        return {cut for leaf in leaves for cut in self.positions.cuts(leaf)} - {256}
