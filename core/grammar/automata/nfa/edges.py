"""The states and edges of an NFA under construction: put down step by step, and written to arrays at its end."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from graftlm.core.grammar.automata.jit import Int32Array
from graftlm.core.grammar.automata.nfa.arrays import BLOCK, COPY, LITERAL, SKIP, SYMBOL, sort_edges, write_edges
from graftlm.core.grammar.automata.nfa.nfa import Loop, Nfa
from graftlm.core.grammar.automata.utf8 import byte_graph
from graftlm.core.grammar.budget import TooManyStates, check
from graftlm.core.grammar.nodes.nodes import Automaton, Range

Extent = tuple[int, int, int]
"""How many states, edges and epsilon edges there are."""


@dataclass(slots=True)
class Block:
    """What a node becomes, apart from the automaton that it is built in.

    numbers  how many edges and epsilon edges it has, then these, as `write_edges` reads them
    end      the state where it ends, counted from its first one
    """

    num_states: int
    num_edges: int
    num_epsilons: int
    numbers: Int32Array
    end: int

    @classmethod
    def of(cls, num_states: int, edges: Int32Array, epsilons: Int32Array, end: int) -> Block:
        """edges [num_edges, 4] and epsilons [num_epsilons, 2], both int32"""
        sizes = np.array([len(edges), len(epsilons)], np.int32)
        numbers = np.concatenate([sizes, edges.ravel(), epsilons.ravel()])
        return cls(num_states, len(edges), len(epsilons), numbers, end)

    def edges(self) -> Int32Array:
        """int32 [num_edges, 4], which may be written to"""
        return self.numbers[2 : 2 + 4 * self.num_edges].reshape(-1, 4)


@dataclass(slots=True)
class Fragment:
    """What a node became where it was first met: all between two extents, and the state where it ends."""

    begin: Extent
    last: Extent
    end: int


class NfaEdges:
    """Edges on bytes, or symbols beyond them; and epsilon edges.

    extent   how many of them there are
    marks    of states, as `Nfa.mark` has them
    regions  states [first, last) that belong to a loop; inner ones come first
    """

    def __init__(self, max_states: int) -> None:
        self._max_states = max_states
        self.num_states = 0
        self._num_edges = self._num_epsilons = 0
        self._steps: list[int] = []
        self._texts = bytearray()
        self._copies: list[int] = []
        self._blocks: dict[int, tuple[int, Block]] = {}  # by id: where each begins among all that were added
        self._automata: dict[int, tuple[Automaton, Block]] = {}  # by id of the automaton
        self._num_numbers = 0
        self.marks: dict[int, int] = {}
        self.regions: list[tuple[int, int, int]] = []
        self.loops: list[Loop] = []

    def new(self, count: int = 1) -> int:
        """`count` more states. -> the first of them"""
        first = self.num_states
        self.num_states += count
        if first >> 8 != self.num_states >> 8:
            check()
        if self.num_states > self._max_states:
            raise TooManyStates(
                f"the constraint needs more than {self._max_states:,} places; "
                "make its counted repeats smaller or raise limits.states"
            )
        return first

    def skip(self, source: int, target: int) -> None:
        """Add an epsilon edge."""
        self._steps += (SKIP, source, target, 0)
        self._num_epsilons += 1

    def add_symbol(self, symbol: int, source: int) -> int:
        target = self.new()
        self._steps += (SYMBOL, source, target, symbol)
        self._num_edges += 1
        return target

    def add_literal(self, data: bytes, source: int) -> int:
        num_bytes = len(data)
        first = self.new(num_bytes)
        self._steps += (LITERAL, source, first, num_bytes)
        self._texts += data
        self._num_edges += num_bytes
        return first + num_bytes - 1

    def add_set(self, ranges: tuple[Range, ...], source: int) -> int:
        """One code point of `ranges`."""
        return self.add_block(_block_of_set(ranges), source)

    def add_automaton(self, node: Automaton, source: int) -> int:
        _, block = self._automata.get(id(node)) or self._automata.setdefault(id(node), (node, _block_of(node)))
        return self.add_block(block, source)

    @property
    def extent(self) -> Extent:
        return self.num_states, self._num_edges, self._num_epsilons

    def copy(self, known: Fragment, source: int) -> int:
        """The same again after state `source`. -> the state where it ends"""
        (begin, edge, epsilon), (last, edges_end, epsilons_end) = known.begin, known.last
        first = self.new(last - begin)
        self._steps += (COPY, source, first, len(self._copies) // 5)
        self._copies += (begin, edge, edges_end, epsilon, epsilons_end)
        self._num_edges += edges_end - edge
        self._num_epsilons += epsilons_end - epsilon
        return known.end - begin + first

    def add_block(self, block: Block, source: int) -> int:
        """Put `block` after state `source`. -> the state where it ends"""
        found = self._blocks.get(id(block))
        if found is None:
            found = self._blocks[id(block)] = (self._num_numbers, block)
            self._num_numbers += len(block.numbers)
        first = self.new(block.num_states)
        self._steps += (BLOCK, source, first, found[0])
        self._num_edges += block.num_edges
        self._num_epsilons += block.num_epsilons
        return block.end + first

    def _written(self) -> tuple[Int32Array, Int32Array]:
        """Edges and epsilon edges, as `write_edges` leaves them."""
        edges, epsilons = np.empty((self._num_edges, 4), np.int32), np.empty((self._num_epsilons, 2), np.int32)
        blocks = [block.numbers for _, block in self._blocks.values()]
        write_edges(
            _rows(self._steps, 4),
            np.array(self._texts, np.uint8),
            _rows(self._copies, 5),
            np.concatenate(blocks) if blocks else np.empty(0, np.int32),
            edges,
            epsilons,
        )
        return edges, epsilons

    def finish(self, start: int, final: int) -> Nfa:
        n = self.num_states
        edges, epsilons = self._written()
        edge_ptr, epsilon_ptr = np.zeros(n + 1, np.int32), np.zeros(n + 1, np.int32)
        sorted_edges, targets = np.empty((len(edges), 3), np.int32), np.empty(len(epsilons), np.int32)
        classes = np.empty(256, np.uint8)
        num_classes = sort_edges(edges, epsilons, edge_ptr, sorted_edges, epsilon_ptr, targets, classes)
        mark, region, relevant = np.zeros(n, np.int32), np.full(n, -1, np.int32), np.zeros(n, np.int32)
        for state, value in self.marks.items():
            mark[state] = value
        for first, last, number in reversed(self.regions):
            region[first:last] = number
            relevant[first:last] |= 3 << (2 * self.loops[number].register)
        return Nfa(
            num_states=n,
            start=start,
            final=final,
            classes=classes,
            num_classes=num_classes,
            edge_ptr=edge_ptr,
            edges=sorted_edges,
            epsilon_ptr=epsilon_ptr,
            epsilons=targets,
            mark=mark,
            region=region,
            relevant=relevant,
            loops=tuple(self.loops),
        )


def _rows(numbers: list[int], width: int) -> Int32Array:
    return np.array(array("i", numbers), np.int32).reshape(-1, width)


@lru_cache(maxsize=512)
def _block_of_set(ranges: tuple[Range, ...]) -> Block:
    graph = byte_graph(ranges)
    rows = zip(graph.sources, graph.targets, graph.lows, graph.highs, strict=True)
    edges = np.array(list(rows), np.int32).reshape(-1, 4)
    edges[:, :2] -= 1  # node 0 is the state that it begins at
    return Block.of(graph.num_nodes - 1, edges, np.empty((0, 2), np.int32), 0)


def _block_of(node: Automaton) -> Block:
    skips = np.empty((len(node.ends) + 1, 2), np.int32)
    skips[0] = -1, 0
    skips[1:, 0], skips[1:, 1] = node.ends, node.num_states
    return Block.of(node.num_states + 1, node.edges, skips, node.num_states)
