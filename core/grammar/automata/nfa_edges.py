"""The states and edges of an NFA under construction, in arrays that grow."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.ast import Automaton
from graftlm.core.grammar.automata.jit import Int32Array
from graftlm.core.grammar.automata.nfa import Loop, Nfa
from graftlm.core.grammar.automata.utf8 import ByteGraph
from graftlm.core.grammar.budget import check

if TYPE_CHECKING:
    import numpy.typing as npt

_MAX_KEPT_ROWS = 5000

Extent = tuple[int, int, int]
"""How many states, edges and epsilon edges there are."""


@dataclass(slots=True)
class Block:
    """What a node becomes, apart from the automaton that it was built in.

    numbers  the sources and targets of its edges, then those of its epsilon edges, counted from its first state
    outer    which of these are the state that it is added after
    end      the state where it ends
    """

    num_states: int
    num_edges: int
    num_epsilons: int
    numbers: Int32Array
    outer: npt.NDArray[np.intp]
    lows: array[int]
    highs: array[int]
    end: int


@dataclass(slots=True)
class Fragment:
    """What a node became where it was first met: all between two extents, and the state where it ends.

    block  once it is copied
    """

    begin: Extent
    last: Extent
    end: int
    block: Block | None = None


class NfaEdges:
    """Edges on bytes, or symbols beyond them, from `lows` to `highs`; and epsilon edges.

    marks    of states, as `Nfa.mark` has them
    regions  states [first, last) that belong to a loop; inner ones come first
    """

    def __init__(self, max_states: int) -> None:
        self._max_states = max_states
        self.num_states = 0
        self._sources, self._targets = array("i"), array("i")
        self._lows, self._highs = array("H"), array("H")
        self._froms, self._tos = array("i"), array("i")
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
            raise GrammarError(
                f"the constraint needs more than {self._max_states:,} places; "
                "make its counted repeats smaller or raise limits.states"
            )
        return first

    def skip(self, source: int, target: int) -> None:
        """Add an epsilon edge."""
        self._froms.append(source)
        self._tos.append(target)

    def add_symbol(self, symbol: int, source: int) -> int:
        target = self.new()
        self._sources.append(source)
        self._lows.append(symbol)
        self._highs.append(symbol)
        self._targets.append(target)
        return target

    def add_literal(self, data: bytes, source: int) -> int:
        first = self.new(len(data))
        last = first + len(data) - 1
        self._sources.append(source)
        self._sources.extend(range(first, last))
        self._targets.extend(range(first, last + 1))
        self._lows.extend(data)
        self._highs.extend(data)
        return last

    def add_graph(self, graph: ByteGraph, source: int) -> int:
        """Copy a graph: its node 0 becomes `source`."""
        offset = self.new(graph.num_nodes - 1) - 1
        self._lows.extend(graph.lows)
        self._highs.extend(graph.highs)
        if graph.num_nodes == 2:
            self._sources.extend([source] * len(graph.lows))
            self._targets.extend([offset + 1] * len(graph.lows))
        else:
            self._sources.extend([n + offset if n else source for n in graph.sources])
            self._targets.extend([n + offset for n in graph.targets])
        return offset + 1

    def add_automaton(self, node: Automaton, source: int) -> int:
        first = self.new(len(node.rows) + 1)
        end = self.num_states - 1
        self.skip(source, first)
        for state in node.accepting:
            self.skip(first + state, end)
        sources, targets, lows, highs = (_kept_columns if len(node.rows) <= _MAX_KEPT_ROWS else _columns)(node)
        self._sources.frombytes((sources + np.int32(first)).tobytes())
        self._targets.frombytes((targets + np.int32(first)).tobytes())
        self._lows += lows
        self._highs += highs
        return end

    @property
    def extent(self) -> Extent:
        return self.num_states, len(self._sources), len(self._froms)

    def copy(self, known: Fragment, source: int) -> int:
        """The same again after state `source`. -> the state where it ends"""
        if known.block is None:
            known.block = self.block(known)
        return self.add_block(known.block, source)

    def block(self, known: Fragment) -> Block:
        """All that lies between two extents, as something to be added elsewhere."""
        (first, edge, epsilon), (last, edges_end, epsilons_end) = known.begin, known.last
        edges, epsilons = slice(edge, edges_end), slice(epsilon, epsilons_end)
        ends = self._sources[edges] + self._targets[edges] + self._froms[epsilons] + self._tos[epsilons]
        numbers = np.array(ends) - np.int32(first)
        return Block(
            num_states=last - first,
            num_edges=edges_end - edge,
            num_epsilons=epsilons_end - epsilon,
            numbers=numbers,
            outer=np.flatnonzero(numbers < 0),
            lows=self._lows[edges],
            highs=self._highs[edges],
            end=known.end - first,
        )

    def add_block(self, block: Block, source: int) -> int:
        """Put `block` after state `source`. -> the state where it ends"""
        first = self.new(block.num_states)
        moved = block.numbers + np.int32(first)
        moved[block.outer] = source
        data = memoryview(moved.tobytes())
        cut, end = 4 * block.num_edges, 4 * block.num_epsilons
        self._sources.frombytes(data[:cut])
        self._targets.frombytes(data[cut : 2 * cut])
        self._froms.frombytes(data[2 * cut : 2 * cut + end])
        self._tos.frombytes(data[2 * cut + end :])
        self._lows += block.lows
        self._highs += block.highs
        return block.end + first

    def finish(self, start: int, final: int) -> Nfa:
        n = self.num_states
        sources, froms = np.array(self._sources), np.array(self._froms)
        lows, highs = np.array(self._lows).astype(np.int64), np.array(self._highs).astype(np.int64)
        cuts = np.zeros(max(255, int(highs.max(initial=0))) + 2, bool)
        cuts[lows] = cuts[highs + 1] = True
        cuts[0] = False
        cuts[256:] = True  # symbols are told apart from bytes and from each other
        classes = np.cumsum(cuts[:-1])
        order = np.argsort(sources, kind="stable")
        edges = np.empty((len(order), 3), np.int32)
        edges[:, 0], edges[:, 1], edges[:, 2] = (
            classes[lows[order]],
            classes[highs[order]],
            np.array(self._targets)[order],
        )
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
            classes=classes[:256].astype(np.uint8),
            num_classes=int(classes[-1]) + 1,
            edge_ptr=_row_pointers(sources, n),
            edges=edges,
            epsilon_ptr=_row_pointers(froms, n),
            epsilons=np.array(self._tos)[np.argsort(froms, kind="stable")],
            mark=mark,
            region=region,
            relevant=relevant,
            loops=tuple(self.loops),
        )


_Columns = tuple[Int32Array, Int32Array, "array[int]", "array[int]"]
"""Sources, targets, lows and highs of edges."""


def _columns(node: Automaton) -> _Columns:
    edges = [(state, target, low, high) for state, row in enumerate(node.rows) for low, high, target in row]
    sources, targets, lows, highs = zip(*edges, strict=True) if edges else ((), (), (), ())
    return np.array(sources, np.int32), np.array(targets, np.int32), array("H", lows), array("H", highs)


_kept_columns = lru_cache(maxsize=128)(_columns)


def _row_pointers(rows: Int32Array, num_rows: int) -> Int32Array:
    pointers = np.zeros(num_rows + 1, np.int32)
    np.cumsum(np.bincount(rows, minlength=num_rows), out=pointers[1:])
    return pointers
