"""The nodes of a constraint as an NFA."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from graftlm.core.errors import GrammarError
from graftlm.core.grammar import ast
from graftlm.core.grammar.ast import Difference, Graph, Intersection, Node, Repeat
from graftlm.core.grammar.automata.jit import Int32Array
from graftlm.core.grammar.automata.nfa import Loop, Nfa, Path
from graftlm.core.grammar.automata.utf8 import ByteGraph, byte_graph
from graftlm.core.grammar.budget import check

if TYPE_CHECKING:
    import numpy.typing as npt

_NONE: Mapping[str, Any] = MappingProxyType({})

UNROLL_COUNT = 4  # repeats up to this many times are always unrolled
UNROLL_EDGES = 64  # and so are those that cost no more byte edges than this
MAX_REGISTERS = 4  # counters that can run at the same time: the depth of counted repeats in one another


@dataclass(slots=True)
class _Fragment:
    """What a node became where it was first met: its states, its edges of both kinds, and the state where it ends."""

    states: tuple[int, int]
    edges: slice
    epsilons: slice
    end: int
    numbers: Int32Array | None = None  # once it is copied: what its edges come from and lead to
    outer: npt.NDArray[np.intp] | None = None  # which of these are the state that it was added after


class NfaBuilder:
    """Build one automaton; repeats whose path is in `unrolled` get no counter.

    symbols  of the rules that are called, as edges of their own beyond the bytes: from 256 on
    bodies   of the rules that are written out where they are named, but inside themselves
    product  makes an automaton of an intersection or a difference; None where there is neither
    """

    def __init__(
        self,
        max_states: int,
        unrolled: Container[Path] = (),
        counters: bool = True,
        symbols: Mapping[str, int] = _NONE,
        bodies: Mapping[str, Node] = _NONE,
        product: Callable[[Intersection | Difference], Node] | None = None,
    ) -> None:
        self._max_states = max_states
        self._unrolled = unrolled
        self._counters = counters
        self._symbols = symbols
        self._bodies = bodies
        self._product = product
        self._inside: tuple[str, ...] = ()
        self._num_states = 0
        self._sources, self._targets = array("i"), array("i")
        self._lows, self._highs = array("H"), array("H")
        self._froms, self._tos = array("i"), array("i")  # epsilon edges
        self._marks: dict[int, int] = {}
        self._regions: list[tuple[int, int, int]] = []  # states [first, last) belong to a loop; inner ones come first
        self._loops: list[Loop] = []
        self._loop = -1
        self._depth = 0
        self._path: list[int] = []
        self._sizes: dict[int, int] = {}
        self._fragments: dict[tuple[int, tuple[str, ...]], _Fragment] = {}
        self._num_counted = 0

    def build(self, node: Node) -> Nfa:
        start = self._new()
        final = self._add(node, start)
        return self._finish(start, final)

    def build_rules(self, node: Node, rules: Sequence[tuple[str, Node]], end: int) -> Nfa:
        """`node` and rules in one automaton, whose first state leads to them.

        end  a symbol: to `node` from the first state, and after the last byte of `node` and of each rule; to a rule
             leads the symbol that calls it
        """
        start, final = self._new(2), self._num_states - 1
        for symbol, inside, body in [(end, (), node), *((self._symbols[name], (name,), body) for name, body in rules)]:
            self._inside = inside
            last = self._add(body, self._add_symbol(symbol, start))
            self._skip(self._add_symbol(end, last), final)
        return self._finish(start, final)

    def _new(self, count: int = 1) -> int:
        first = self._num_states
        self._num_states += count
        if first >> 8 != self._num_states >> 8:
            check()
        if self._num_states > self._max_states:
            raise GrammarError(
                f"the constraint needs more than {self._max_states:,} places; "
                "make its counted repeats smaller or raise limits.states"
            )
        return first

    def _add(self, node: Node, source: int) -> int:
        """Put `node` after state `source`; return the state where it ends."""
        if not isinstance(node, (ast.Concat, ast.Alternation, Repeat, Graph, ast.Automaton)):
            return self._build(node, source)
        key = (id(node), self._inside)
        known = self._fragments.get(key)
        if known is not None:
            return self._copy(known, source)
        states, edges, epsilons, counted = self._num_states, len(self._sources), len(self._froms), self._num_counted
        end = self._build(node, source)
        if counted == self._num_counted and end >= states:  # what is counted depends on its place
            self._fragments[key] = _Fragment(
                (states, self._num_states), slice(edges, len(self._sources)),
                slice(epsilons, len(self._froms)), end,
            )  # fmt: skip
        return end

    def _copy(self, known: _Fragment, source: int) -> int:
        first, last = known.states
        offset = self._new(last - first) - first
        if known.numbers is None:
            ends = self._sources[known.edges] + self._targets[known.edges]
            known.numbers = np.array(ends + self._froms[known.epsilons] + self._tos[known.epsilons])
            known.outer = np.flatnonzero(known.numbers < first)
        moved = known.numbers + np.int32(offset)
        moved[known.outer] = source
        data = memoryview(moved.tobytes())
        for states, part in ((self._sources, known.edges), (self._targets, known.edges),
                             (self._froms, known.epsilons), (self._tos, known.epsilons)):  # fmt: skip
            size = 4 * (part.stop - part.start)
            states.frombytes(data[:size])
            data = data[size:]
        self._lows += self._lows[known.edges]
        self._highs += self._highs[known.edges]
        return known.end + offset

    def _skip(self, source: int, target: int) -> None:
        """Add an epsilon edge."""
        self._froms.append(source)
        self._tos.append(target)

    def _build(self, node: Node, source: int) -> int:
        match node:
            case ast.Literal(data):
                return self._add_literal(data, source)
            case ast.CharSet(ranges):
                return self._add_graph(byte_graph(ranges), source)
            case ast.Concat(items):
                for i, item in enumerate(items):
                    self._path.append(i)
                    source = self._add(item, source)
                    self._path.pop()
                return source
            case ast.Alternation(items):
                return self._add_alternation(items, source)
            case Repeat():
                return self._add_repeat(node, source)
            case Graph():
                return self._add_walk(node, source)
            case ast.Automaton():
                return self._add_automaton(node, source)
            case ast.Intersection() | ast.Difference():
                assert self._product is not None, "product.without_products comes before building an automaton"
                return self._add(self._product(node), source)
            case ast.Rule(name):
                return self._add_rule(name, source)
            case ast.Empty():
                return source

    def _add_rule(self, name: str, source: int) -> int:
        if name in self._bodies and name not in self._symbols:
            return self._add(self._bodies[name], source)
        if name in self._bodies and name not in self._inside:
            self._inside += (name,)
            end = self._add(self._bodies[name], source)
            self._inside = self._inside[:-1]
            return end
        if name not in self._symbols:
            raise GrammarError(f"rule {name!r} is context-free; an automaton holds regular constraints only")
        return self._add_symbol(self._symbols[name], source)

    def _add_symbol(self, symbol: int, source: int) -> int:
        target = self._new()
        self._sources.append(source)
        self._lows.append(symbol)
        self._highs.append(symbol)
        self._targets.append(target)
        return target

    def _add_literal(self, data: bytes, source: int) -> int:
        first = self._new(len(data))
        self._sources.append(source)
        self._sources.extend(range(first, first + len(data) - 1))
        self._lows.extend(data)
        self._highs.extend(data)
        self._targets.extend(range(first, first + len(data)))
        return first + len(data) - 1

    def _add_graph(self, graph: ByteGraph, source: int) -> int:
        """Copy a graph: its node 0 becomes `source`."""
        offset = self._new(graph.num_nodes - 1) - 1
        self._sources.extend([n + offset if n else source for n in graph.sources])
        self._lows.extend(graph.lows)
        self._highs.extend(graph.highs)
        self._targets.extend([n + offset for n in graph.targets])
        return offset + 1

    def _add_walk(self, node: Graph, source: int) -> int:
        first, end = self._new(len(node.rows)), self._new()
        self._skip(source, first)
        for state in node.accepting:
            self._skip(first + state, end)
        for state, row in enumerate(node.rows):
            for i, (item, target) in enumerate(row):
                self._path += (state, i)
                start = self._new()
                self._skip(first + state, start)
                self._skip(self._add(item, start), first + target)
                del self._path[-2:]
        return end

    def _add_automaton(self, node: ast.Automaton, source: int) -> int:
        first, end = self._new(len(node.rows)), self._new()
        self._skip(source, first)
        for state in node.accepting:
            self._skip(first + state, end)
        self._sources.extend([state for state, row in enumerate(node.rows, first) for _ in row])
        edges = [edge for row in node.rows for edge in row]
        self._lows.extend([low for low, _, _ in edges])
        self._highs.extend([high for _, high, _ in edges])
        self._targets.extend([first + target for _, _, target in edges])
        return end

    def _add_alternation(self, items: tuple[Node, ...], source: int) -> int:
        end = self._new()
        words = [item.data for item in items if isinstance(item, ast.Literal)]
        if len(words) > 2:
            self._add_words(sorted(set(words)), source, end)
            items = tuple(item for item in items if not isinstance(item, ast.Literal))
        for i, item in enumerate(items):
            self._path.append(i)
            start = self._new()
            self._skip(source, start)
            self._skip(self._add(item, start), end)
            self._path.pop()
        return end

    def _add_words(self, words: list[bytes], source: int, end: int) -> None:
        """Many literals share what they begin with, so that a long list costs no wide sets of states."""
        start = self._new()
        self._skip(source, start)
        path, previous = [start], b""
        for word in words:
            shared = 0
            while shared < min(len(word), len(previous)) and word[shared] == previous[shared]:
                shared += 1
            del path[shared + 1 :]
            last = self._add_literal(word[shared:], path[-1])
            path.extend(range(last - len(word) + shared + 1, last + 1))
            self._skip(path[-1], end)
            previous = word

    def _add_repeat(self, node: Repeat, source: int) -> int:
        if self._is_counted(node):
            return self._add_loop(node, source)
        self._path.append(0)
        state = source
        for _ in range(node.min):
            state = self._add(node.item, state)
        end = self._new()
        if node.max is None:
            hub = self._new()
            self._skip(state, hub)
            self._skip(self._add(node.item, hub), hub)
            self._skip(hub, end)
        else:
            for _ in range(node.max - node.min):
                self._skip(state, end)
                state = self._add(node.item, state)
            self._skip(state, end)
        self._path.pop()
        return end

    def _add_loop(self, node: Repeat, source: int) -> int:
        number = len(self._loops)
        enter, tick, leave = self._new(3), self._num_states - 2, self._num_states - 1
        self._skip(source, enter)
        outer, self._loop = self._loop, number
        first = body = self._new()
        self._loops.append(
            Loop(
                path=tuple(self._path),
                minimum=node.min,
                maximum=-1 if node.max is None else node.max,
                cost=self._size(node.item) * (node.max or node.min),
                register=self._depth,
                parent=outer,
                body=body,
                exit=leave,
            )
        )
        self._depth += 1
        self._path.append(0)
        self._skip(self._add(node.item, body), tick)
        self._path.pop()
        self._depth -= 1
        self._regions.append((first, self._num_states, number))
        self._loop = outer
        self._marks[enter], self._marks[tick] = number + 1, -(number + 1)
        return leave

    def _is_counted(self, node: Repeat) -> bool:
        count = node.min if node.max is None else node.max
        costs = (
            self._counters
            and count > UNROLL_COUNT
            and count * self._size(node.item) > UNROLL_EDGES
            and not ast.nullable(node.item)
        )
        self._num_counted += costs
        return costs and self._depth < MAX_REGISTERS and tuple(self._path) not in self._unrolled

    def _size(self, node: Node) -> int:
        """Byte edges that `node` costs, about."""
        key = id(node)
        if key not in self._sizes:
            match node:
                case ast.Literal(data):
                    size = len(data)
                case ast.CharSet(ranges):
                    size = len(byte_graph(ranges).sources)
                case ast.Concat(items) | ast.Alternation(items):
                    size = sum(map(self._size, items))
                case Repeat(item, minimum, maximum):
                    size = self._size(item) * (minimum + 1 if maximum is None else maximum)
                case Graph(rows):
                    size = sum(self._size(item) for row in rows for item, _ in row)
                case ast.Automaton(edges):
                    size = sum(map(len, edges))
                case _:
                    size = 0
            self._sizes[key] = size
        return self._sizes[key]

    def _finish(self, start: int, final: int) -> Nfa:
        n = self._num_states
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
        for state, value in self._marks.items():
            mark[state] = value
        for first, last, number in reversed(self._regions):
            region[first:last] = number
            relevant[first:last] |= 3 << (2 * self._loops[number].register)
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
            loops=tuple(self._loops),
        )


def _row_pointers(rows: Int32Array, num_rows: int) -> Int32Array:
    pointers = np.zeros(num_rows + 1, np.int32)
    np.cumsum(np.bincount(rows, minlength=num_rows), out=pointers[1:])
    return pointers
