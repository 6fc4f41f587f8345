"""Positions inside a node: the rest that is left to be written, and the rest after one more byte.

A `Rest` is a node, how far it has been written, and the Rest that comes after it. Rests are made when they are first
needed, so a counted repeat or a long object costs only the places that a text reaches.
"""

from __future__ import annotations

from dataclasses import dataclass

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
from graftlm.core.grammar.budget import check

INFINITE = 1 << 2048  # beyond the shortest text of any schema: definitions that double each other reach 2**40
MAX_STATES = 20_000


@dataclass(eq=False, slots=True)
class Rest:
    """What is left: of `node` what comes after `index`, then all of `next`.

    index    of a Literal: bytes written; of a Concat: items; of a Repeat: rounds, as far as they matter; of a CharSet,
             a Graph, an Automaton and a product: the state
    is_leaf  it reads the next byte, or a rule: of a Concat, its next item does
    """

    node: Node
    index: int
    next: Rest | None
    leaves: tuple[Rest, ...] | None = None
    distance: int = -1
    is_leaf: bool = False


END = Rest(EMPTY, 0, None, distance=0, is_leaf=True)
"""Nothing is left."""


class Positions:
    """The Rests of some nodes, each made once. A Rule is a leaf here: whoever meets one has to read its body."""

    def __init__(self) -> None:
        self._rests: dict[tuple[int, int, int], Rest] = {}
        self._products: dict[Node, Product] = {}
        self._steps: dict[tuple[int, int], tuple[Rest, ...]] = {}  # of automata and products

    def rest(self, node: Node, index: int, after: Rest) -> Rest:
        key = (id(node), index, id(after))
        found = self._rests.get(key)
        if found is None:
            found = self._rests[key] = Rest(node, index, after)  # which keeps the node, so that its id stays its own
            first = node.items[index] if isinstance(node, Concat) else node
            found.is_leaf = isinstance(first, Literal | CharSet) or isinstance(node, Rule)
        return found

    def product(self, node: Intersection | Difference) -> Product:
        """The automaton of a product, whose states are found as they are asked for."""
        found = self._products.get(node)
        if found is None:
            found = self._products[node] = Product(node)
        return found

    def leaves(self, rest: Rest) -> tuple[Rest, ...]:
        """The Rests that `rest` may go on with, each about to read a byte or a rule; END where it may end."""
        if rest.is_leaf:
            return (rest,)
        if rest.leaves is None:
            found: dict[int, Rest] = {}
            seen = {id(rest)}
            work = [rest]
            while work:
                here = work.pop()
                if here.is_leaf or not self._expand(here, work, seen):
                    found[id(here)] = here
            rest.leaves = tuple(found.values())
        return rest.leaves

    def _expand(self, here: Rest, work: list[Rest], seen: set[int]) -> bool:
        """Put what `here` may go on with on `work`; False where it reads a byte or a rule itself."""
        node, index, after = here.node, here.index, here.next
        assert after is not None
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
            if id(way) not in seen:
                seen.add(id(way))
                work.append(way)
        return not is_leaf

    def _ways(self, node: Node, after: Rest) -> list[Rest]:
        """The beginnings of `node`: of an Alternation those of its items."""
        if isinstance(node, Alternation):
            return [way for item in node.items for way in self._ways(item, after)]
        return [self.rest(node, 0, after)]

    def literal(self, leaf: Rest, num_bytes: int) -> tuple[Rest, ...]:
        """The leaves after so many more bytes of the Literal that `leaf` reads."""
        node, index = part(leaf)
        assert isinstance(node, Literal)
        after, index = self._after(leaf), index + num_bytes
        return self.leaves(after if index == len(node.data) else self.rest(node, index, after))

    def step(self, leaf: Rest, byte: int) -> tuple[Rest, ...]:
        """The leaves after one more byte; none where it is not allowed. A leaf that is a Rule takes no byte."""
        node, index = part(leaf)
        if isinstance(node, Literal):
            return self.literal(leaf, 1) if node.data[index] == byte else ()
        if isinstance(node, CharSet):
            target = byte_graph(node.ranges).step(index, byte)
            if target is None:
                return ()
            after = self._after(leaf)
            return self.leaves(after if target == 1 else self.rest(node, target, after))
        key = (id(leaf), byte)
        found = self._steps.get(key)
        if found is None:
            found = self._steps[key] = self._step(leaf, byte)
        return found

    def _step(self, leaf: Rest, byte: int) -> tuple[Rest, ...]:
        node, index = leaf.node, leaf.index
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
        assert leaf.next is not None
        if isinstance(leaf.node, Concat) and leaf.index + 1 < len(leaf.node.items):
            return self.rest(leaf.node, leaf.index + 1, leaf.next)
        return leaf.next


def part(leaf: Rest) -> tuple[Node, int]:
    """The node that reads the next byte at a leaf, and how far it was written."""
    node = leaf.node
    return (node.items[leaf.index], 0) if isinstance(node, Concat) else (node, leaf.index)


class Product:
    """The automaton of an Intersection or a Difference; a state is a set of Rests for each part, 0 is the start."""

    def __init__(self, node: Intersection | Difference) -> None:
        self._is_difference = isinstance(node, Difference)
        parts = (node.item, node.minus) if isinstance(node, Difference) else node.items
        self._positions = Positions()
        starts = tuple(frozenset(self._positions.leaves(self._positions.rest(part, 0, END))) for part in parts)
        self._states = [starts]
        self._numbers = {starts: 0}
        self._steps: dict[tuple[int, int], int | None] = {}
        self._endings: dict[int, bytes | None] = {}

    def accepts(self, state: int) -> bool:
        ends = [END in part for part in self._states[state]]
        return ends[0] and not any(ends[1:]) if self._is_difference else all(ends)

    def step(self, state: int, byte: int) -> int | None:
        key = (state, byte)
        if key not in self._steps:
            step = self._positions.step
            after = tuple(frozenset(new for leaf in part for new in step(leaf, byte)) for part in self._states[state])
            dead = not after[0] if self._is_difference else not all(after)
            self._steps[key] = None if dead else self._number(after)
        return self._steps[key]

    def _number(self, parts: tuple[frozenset[Rest], ...]) -> int:
        if parts not in self._numbers:
            if len(self._states) >= MAX_STATES:
                raise GrammarError(
                    f"a combination of patterns needs more than {MAX_STATES:,} states; use fewer at once"
                )
            self._numbers[parts] = len(self._states)
            self._states.append(parts)
        return self._numbers[parts]

    def ending(self, state: int) -> bytes | None:
        """The fewest bytes to an accepting state; None if there is no way."""
        if state not in self._endings:
            came_from: dict[int, tuple[int, int] | None] = {state: None}
            found = None
            queue = [state]
            for here in queue:
                check()
                if self.accepts(here):
                    found = here
                    break
                for byte in sorted(self._cuts(here)):
                    after = self.step(here, byte)
                    if after is not None and after not in came_from:
                        came_from[after] = (here, byte)
                        queue.append(after)
            self._endings[state] = None if found is None else _way(came_from, found)
        return self._endings[state]

    def _cuts(self, state: int) -> set[int]:
        """The first byte of each kind that a state tells apart."""
        found: set[int] = set()
        for leaf in {leaf for part in self._states[state] for leaf in part}:
            if isinstance(leaf.node, (Intersection, Difference)):
                found |= self._positions.product(leaf.node)._cuts(leaf.index)
            else:
                found.update(cut for low, high in _edges(leaf) for cut in (low, high + 1))
        return found - {256}


def _way(came_from: dict[int, tuple[int, int] | None], state: int) -> bytes:
    data = bytearray()
    link = came_from[state]
    while link is not None:
        data.append(link[1])
        link = came_from[link[0]]
    return bytes(reversed(data))


def _edges(leaf: Rest) -> list[tuple[int, int]]:
    node, index = part(leaf)
    match node:
        case Literal(data):
            return [(data[index], data[index])]
        case CharSet(ranges):
            graph = byte_graph(ranges)
            return [(graph.lows[i], graph.highs[i]) for i, source in enumerate(graph.sources) if source == index]
        case Automaton(rows):
            return [(low, high) for low, high, _ in rows[index]]
        case _:
            return []
