"""The nodes of a constraint as an NFA."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.automata.nfa.edges import Fragment, NfaEdges
from graftlm.core.grammar.automata.nfa.nfa import Loop, Nfa, Path
from graftlm.core.grammar.automata.utf8 import byte_graph
from graftlm.core.grammar.nodes import nodes
from graftlm.core.grammar.nodes.nodes import Difference, Graph, Intersection, Node, Repeat

_NONE: Mapping[str, Any] = MappingProxyType({})

UNROLL_COUNT = 4  # repeats up to this many times are always unrolled
UNROLL_EDGES = 64  # and so are those that cost no more byte edges than this
MAX_REGISTERS = 4  # counters that can run at the same time: the depth of counted repeats in one another


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
        self._unrolled = unrolled
        self._counters = counters
        self._symbols = symbols
        self._bodies = bodies
        self._product = product
        self._inside: tuple[str, ...] = ()
        self._edges = NfaEdges(max_states)
        self._loop = -1
        self._depth = 0
        self._path: list[int] = []
        self._sizes: dict[int, int] = {}
        self._fragments: dict[tuple[int, tuple[str, ...]], Fragment] = {}
        self._num_counted = 0

    def build(self, node: Node) -> Nfa:
        start = self._edges.new()
        final = self._add(node, start)
        return self._edges.finish(start, final)

    def build_rules(self, node: Node, rules: Sequence[tuple[str, Node]], end: int) -> Nfa:
        """`node` and rules in one automaton, whose first state leads to them.

        end  a symbol: to `node` from the first state, and after the last byte of `node` and of each rule; to a rule
             leads the symbol that calls it
        """
        start, final = self._edges.new(2), self._edges.num_states - 1
        for symbol, inside, body in [(end, (), node), *((self._symbols[name], (name,), body) for name, body in rules)]:
            self._inside = inside
            last = self._add(body, self._edges.add_symbol(symbol, start))
            self._edges.skip(self._edges.add_symbol(end, last), final)
        return self._edges.finish(start, final)

    def _add(self, node: Node, source: int) -> int:
        """Put `node` after state `source`; return the state where it ends. No edge leads back into `source`."""
        if isinstance(node, nodes.Literal):
            return self._edges.add_literal(node.data, source)
        if isinstance(node, nodes.CharSet):
            return self._edges.add_set(node.ranges, source)
        if isinstance(node, nodes.Empty):
            return source
        if isinstance(node, nodes.Rule):
            return self._add_rule(node.name, source)
        if isinstance(node, nodes.Automaton):
            return self._edges.add_automaton(node, source)
        key, edges = (id(node), self._inside), self._edges
        known = self._fragments.get(key)
        if known is not None:
            return edges.copy(known, source)
        begin, counted = edges.extent, self._num_counted
        end = self._build(node, source)
        if counted == self._num_counted and end >= begin[0]:  # what is counted depends on its place
            self._fragments[key] = Fragment(begin, edges.extent, end)
        return end

    def _build(self, node: Node, source: int) -> int:
        match node:
            case nodes.Concat(items):
                if not self._counters:  # then no path is asked for
                    for item in items:
                        source = self._add(item, source)
                    return source
                for i, item in enumerate(items):
                    self._path.append(i)
                    source = self._add(item, source)
                    self._path.pop()
                return source
            case nodes.Alternation(items):
                return self._add_alternation(items, source)
            case Repeat():
                return self._add_repeat(node, source)
            case Graph():
                return self._add_walk(node, source)
            case nodes.Intersection() | nodes.Difference():
                assert self._product is not None, "product.without_products comes before building an automaton"
                return self._add(self._product(node), source)
            case _:
                raise AssertionError(node)

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
        return self._edges.add_symbol(self._symbols[name], source)

    def _add_walk(self, node: Graph, source: int) -> int:
        first = self._edges.new(len(node.rows) + 1)
        end = self._edges.num_states - 1
        self._edges.skip(source, first)
        for state in node.accepting:
            self._edges.skip(first + state, end)
        for state, row in enumerate(node.rows, first):
            for i, (item, target) in enumerate(row):
                if type(item) is nodes.Empty:
                    self._edges.skip(state, first + target)
                    continue
                self._path += (state - first, i)
                self._edges.skip(self._add(item, state), first + target)
                del self._path[-2:]
        return end

    def _add_alternation(self, items: tuple[Node, ...], source: int) -> int:
        end = self._edges.new()
        words = [item.data for item in items if isinstance(item, nodes.Literal)]
        if len(words) > 2:
            self._add_words(sorted(set(words)), source, end)
            items = tuple(item for item in items if not isinstance(item, nodes.Literal))
        for i, item in enumerate(items):
            self._path.append(i)
            self._edges.skip(self._add(item, source), end)
            self._path.pop()
        return end

    def _add_words(self, words: list[bytes], source: int, end: int) -> None:
        """Many literals share what they begin with, so that a long list costs no wide sets of states."""
        start = self._edges.new()
        self._edges.skip(source, start)
        path, previous = [start], b""
        for word in words:
            shared = 0
            while shared < min(len(word), len(previous)) and word[shared] == previous[shared]:
                shared += 1
            del path[shared + 1 :]
            last = self._edges.add_literal(word[shared:], path[-1])
            path.extend(range(last - len(word) + shared + 1, last + 1))
            self._edges.skip(path[-1], end)
            previous = word

    def _add_repeat(self, node: Repeat, source: int) -> int:
        if self._is_counted(node):
            return self._add_loop(node, source)
        self._path.append(0)
        state = source
        for _ in range(node.min):
            state = self._add(node.item, state)
        end = self._edges.new()
        if node.max is None:
            hub = self._edges.new()
            self._edges.skip(state, hub)
            self._edges.skip(self._add(node.item, hub), hub)
            self._edges.skip(hub, end)
        else:
            for _ in range(node.max - node.min):
                self._edges.skip(state, end)
                state = self._add(node.item, state)
            self._edges.skip(state, end)
        self._path.pop()
        return end

    def _add_loop(self, node: Repeat, source: int) -> int:
        number = len(self._edges.loops)
        enter, tick, leave = self._edges.new(3), self._edges.num_states - 2, self._edges.num_states - 1
        self._edges.skip(source, enter)
        outer, self._loop = self._loop, number
        first = body = self._edges.new()
        self._edges.loops.append(
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
        self._edges.skip(self._add(node.item, body), tick)
        self._path.pop()
        self._depth -= 1
        self._edges.regions.append((first, self._edges.num_states, number))
        self._loop = outer
        self._edges.marks[enter], self._edges.marks[tick] = number + 1, -(number + 1)
        return leave

    def _is_counted(self, node: Repeat) -> bool:
        count = node.min if node.max is None else node.max
        costs = (
            self._counters
            and count > UNROLL_COUNT
            and count * self._size(node.item) > UNROLL_EDGES
            and not nodes.nullable(node.item)
        )
        self._num_counted += costs
        return costs and self._depth < MAX_REGISTERS and tuple(self._path) not in self._unrolled

    def _size(self, node: Node) -> int:
        """Byte edges that `node` costs, about."""
        key = id(node)
        if key not in self._sizes:
            match node:
                case nodes.Literal(data):
                    size = len(data)
                case nodes.CharSet(ranges):
                    size = len(byte_graph(ranges).lows)
                case nodes.Concat(items) | nodes.Alternation(items):
                    size = sum(map(self._size, items))
                case Repeat(item, minimum, maximum):
                    size = self._size(item) * (minimum + 1 if maximum is None else maximum)
                case Graph(rows):
                    size = sum(self._size(item) for row in rows for item, _ in row)
                case nodes.Automaton():
                    size = node.num_edges
                case _:
                    size = 0
            self._sizes[key] = size
        return self._sizes[key]
