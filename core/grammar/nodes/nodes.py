"""The AST that every constraint is lowered to: a regular expression over code points, as frozen nodes.

    Empty                       the empty text
    Literal(data)               exactly these bytes
    CharSet(ranges)             one code point out of sorted, disjoint, inclusive ranges
    Concat(items)               one after the other
    Alternation(items)          any one of them; no items: no text at all
    Repeat(item, min, max)      min to max times; max None: without end
    Graph(rows, accepting)      a walk over states whose edges are nodes
    Intersection(items)         texts that all of them match
    Difference(item, minus)     texts that `item` matches and `minus` does not
    Automaton(edges, ends)      a byte automaton, as products of the two above become one
    Rule(name)                  a rule of a context-free grammar: such a node is not regular, and no automaton holds it

Nodes may be shared: a schema that uses one definition in twenty places holds it once. Counted repeats need no care:
the automaton keeps a counter beside its states where unrolling would cost many of them (automata/nfa/nfa.py).
Build nodes with the functions below; they flatten, merge and simplify.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeVar, cast, dataclass_transform

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

MAX_CODE_POINT = 0x10FFFF

Range: TypeAlias = tuple[int, int]
T = TypeVar("T")


class ComposedNode:
    """A node with child nodes: its hash is computed once, because nodes nest deep and are keys of many tables."""

    __slots__ = ("_hash", "_survey")
    __match_args__: ClassVar[tuple[str, ...]] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, name) for name in self.__match_args__)  # a hash holds in one process


@dataclass_transform(frozen_default=True)
def simple(cls: type[T]) -> type[T]:
    """Make a dataclass of nodes, frozen for type checkers only: a frozen one takes twice as long to make."""
    return dataclass(unsafe_hash=True, slots=True)(cls)


@dataclass_transform(frozen_default=True)
def composed(cls: type[T]) -> type[T]:
    """Make a dataclass of nodes that cache their hash."""
    made: Any = dataclass(unsafe_hash=True, slots=True)(cls)
    compute: Callable[[Any], int] = made.__hash__

    def cached(self: Any) -> int:
        try:
            found: int = self._hash
        except AttributeError:
            found = self._hash = compute(self)
        return found

    made.__hash__ = cached
    return cast(type[T], made)


@simple
class Empty:
    """The empty text."""


@simple
class Literal:
    """Exactly `data`, which is never empty; usually UTF-8, but any bytes will do."""

    data: bytes


@simple
class CharSet:
    """One code point in `ranges`: sorted, disjoint, not adjacent, inclusive. Surrogates never match."""

    ranges: tuple[Range, ...]


@composed
class Concat(ComposedNode):
    """The items one after the other; at least two."""

    items: tuple[Node, ...]


@composed
class Alternation(ComposedNode):
    """Any one of the items. Without items: the language with no text in it."""

    items: tuple[Node, ...]


@composed
class Repeat(ComposedNode):
    """`item` at least `min` and at most `max` times; `max` None is without end."""

    item: Node
    min: int
    max: int | None


@composed
class Graph(ComposedNode):
    """A walk from state 0 to an accepting state: rows[state] are edges (node, target), accepting ones have no cycle of
    empty edges. Members of an object that may be left out, for one.
    """

    rows: tuple[tuple[tuple[Node, int], ...], ...]
    accepting: frozenset[int]


@composed
class Intersection(ComposedNode):
    """Texts that every item matches; at least two. products/product.py turns it into an Automaton."""

    items: tuple[Node, ...]


@composed
class Difference(ComposedNode):
    """Texts that `item` matches and `minus` does not. products/product.py turns it into an Automaton."""

    item: Node
    minus: Node


class Automaton(ComposedNode):
    """A byte automaton that starts in state 0.

    edges   int32 [num_edges, 4]: source, target, lowest and highest byte, ordered by source, then byte; disjoint
    ends    int32 [num_ends]: the accepting states, ascending
    source  a node of the same language without states, for grammars in another notation; None if there is none
    """

    __match_args__ = ("num_states", "edges", "ends", "source")

    def __init__(
        self, num_states: int, edges: npt.NDArray[np.int32], ends: npt.NDArray[np.int32], source: Node | None = None
    ) -> None:
        self.num_states, self.edges, self.ends, self.source = num_states, edges, ends, source

    def with_source(self, source: Node) -> Automaton:
        """Return the automaton with `source` as the node of its language."""
        return Automaton(self.num_states, self.edges, self.ends, source)

    @classmethod
    def of(cls, rows: Iterable[Sequence[tuple[int, int, int]]], accepting: Iterable[int]) -> Automaton:
        """Return the automaton of rows[state], which lists edges (low, high, target) by their bytes."""
        rows = list(rows)
        edges = [(state, target, low, high) for state, row in enumerate(rows) for low, high, target in row]
        return cls(len(rows), np.array(edges, np.int32).reshape(-1, 4), np.array(sorted(accepting), np.int32))

    @property
    def num_edges(self) -> int:
        return len(self.edges)

    @property
    def is_nothing(self) -> bool:
        return not len(self.ends)

    @property
    def rows(self) -> list[list[tuple[int, int, int]]]:
        """Edges (low, high, target) of each state."""
        rows: list[list[tuple[int, int, int]]] = [[] for _ in range(self.num_states)]
        for source, target, low, high in self.edges.tolist():
            rows[source].append((low, high, target))
        return rows

    @cached_property
    def _key(self) -> tuple[int, bytes, bytes]:
        return self.num_states, self.edges.tobytes(), self.ends.tobytes()

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return self is other or isinstance(other, Automaton) and self._key == other._key


@simple
class Rule:
    """What the rule `name` of a context-free grammar derives; the empty text only where nothing asks `nullable`."""

    name: str


Node: TypeAlias = (
    Empty | Literal | CharSet | Concat | Alternation | Repeat | Graph | Intersection | Difference | Automaton | Rule
)

EMPTY = Empty()
NOTHING = Alternation(())


def is_nothing(node: Node) -> bool:
    """Whether `node` equals NOTHING: many are asked, and equality of nodes takes three times as long."""
    return type(node) is Alternation and not node.items


def literal(text: str | bytes) -> Node:
    """Exactly `text`; a str is encoded as UTF-8."""
    data = text.encode() if isinstance(text, str) else bytes(text)
    return Literal(data) if data else EMPTY


def normalise(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Sort inclusive ranges, drop the empty ones, merge those that overlap or touch."""
    in_order = sorted(ranges)
    if len(in_order) == 1 and in_order[0][0] <= in_order[0][1]:  # most letters of patterns
        return (in_order[0],)
    merged: list[list[int]] = []
    for low, high in in_order:
        if low > high:
            continue
        if merged and low <= merged[-1][1] + 1:
            merged[-1][1] = max(merged[-1][1], high)
        else:
            merged.append([low, high])
    return tuple((low, high) for low, high in merged)


def complement(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """All code points that are in none of `ranges`."""
    gaps, position = [], 0
    for low, high in normalise(ranges):
        if low > position:
            gaps.append((position, low - 1))
        position = high + 1
    if position <= MAX_CODE_POINT:
        gaps.append((position, MAX_CODE_POINT))
    return tuple(gaps)


def intersect(left: Iterable[Range], right: Iterable[Range]) -> tuple[Range, ...]:
    """The code points that are in both."""
    return complement((*complement(left), *complement(right)))


def char_set(ranges: Iterable[Range]) -> Node:
    """One code point in `ranges` (inclusive pairs, in any order)."""
    found = normalise(ranges)
    return CharSet(found) if found else NOTHING


def chars(members: str) -> Node:
    """One of the characters of `members`."""
    return char_set((ord(c), ord(c)) for c in members)


def not_chars(members: str) -> Node:
    """One character that is not in `members`."""
    return char_set(complement((ord(c), ord(c)) for c in members))


ANY_CHAR = CharSet(((0, MAX_CODE_POINT),))


_APART = frozenset((Rule, Repeat, Graph, CharSet))
"""Nodes that `concat` neither flattens nor joins with a neighbour."""


def concat(*items: Node) -> Node:
    """The items one after the other; flattened, with neighbouring literals merged."""
    if len(items) == 2 and type(items[0]) in _APART and type(items[1]) in _APART:  # most names and values of members
        return Concat(items)
    flat: list[Node] = []
    last: Node = EMPTY
    for item in items:
        if type(item) is Rule:  # in a grammar of tokens nearly all are
            flat.append(item)
        elif type(item) is Concat:
            first = item.items[0]  # the others need no care among themselves
            if type(first) is Literal and type(last) is Literal:
                flat[-1] = Literal(last.data + first.data)
                flat += item.items[1:]
            elif type(first) is Alternation and not first.items:
                return NOTHING
            else:
                flat += item.items
        elif type(item) is Literal and type(last) is Literal:
            flat[-1] = Literal(last.data + item.data)
        elif type(item) is Empty:
            continue
        elif type(item) is Alternation and not item.items:
            return NOTHING
        else:
            flat.append(item)
        last = flat[-1]
    if not flat:
        return EMPTY
    return flat[0] if len(flat) == 1 else Concat(tuple(flat))


def alternation(*items: Node) -> Node:
    """Any one of the items; nested alternations are flattened, sets of characters merged."""
    flat: list[Node] = []
    ranges: list[Range] = []
    for item in items:
        parts = item.items if isinstance(item, Alternation) else (item,)
        for part in parts:
            if isinstance(part, CharSet):
                ranges += part.ranges
            else:
                flat.append(part)
    if ranges:
        flat.insert(0, char_set(ranges))
    return flat[0] if len(flat) == 1 else Alternation(tuple(flat))


def repeat(item: Node, minimum: int = 0, maximum: int | None = None) -> Node:
    """`item` from `minimum` to `maximum` times; None is without end."""
    if maximum is not None and maximum < minimum:
        return NOTHING
    if maximum == 0 or isinstance(item, Empty):
        return EMPTY
    if is_nothing(item):
        return EMPTY if minimum == 0 else NOTHING
    if minimum == 1 and maximum == 1:
        return item
    return Repeat(item, minimum, maximum)


def star(item: Node) -> Node:
    """`item` any number of times."""
    return repeat(item, 0, None)


def plus(item: Node) -> Node:
    """`item` at least once."""
    return repeat(item, 1, None)


def optional(item: Node) -> Node:
    """`item` or nothing."""
    return repeat(item, 0, 1)


def separated(item: Node, separator: Node, minimum: int = 0, maximum: int | None = None) -> Node:
    """`minimum` to `maximum` items with `separator` between each two."""
    if maximum is not None and maximum < max(minimum, 1):
        return EMPTY if minimum == 0 and maximum == 0 else NOTHING
    rest = repeat(concat(separator, item), max(minimum - 1, 0), None if maximum is None else maximum - 1)
    some = concat(item, rest)
    return some if minimum > 0 else optional(some)


def map_children(function: Callable[[Node], Node], node: Node) -> Node:
    """`node` with `function` applied to each node directly in it; `node` itself when that changes none of them."""
    match node:
        case Concat(items) | Alternation(items) | Intersection(items):
            mapped = tuple(map(function, items))
            return node if all(map(operator.is_, mapped, items)) else replace(node, items=mapped)
        case Repeat(item, _, _):
            after = function(item)
            return node if after is item else replace(node, item=after)
        case Graph(rows, _):
            made = tuple(tuple((function(item), target) for item, target in row) for row in rows)
            pairs = (pair for row, before in zip(made, rows, strict=True) for pair in zip(row, before, strict=True))
            return node if all(new[0] is old[0] for new, old in pairs) else replace(node, rows=made)
        case Difference(item, minus):
            return Difference(function(item), function(minus))
        case _:
            return node


def children(node: Node) -> tuple[Node, ...]:
    """Return the nodes directly in `node`."""
    match node:
        case Concat(items) | Alternation(items) | Intersection(items):
            return items
        case Repeat(item, _, _):
            return (item,)
        case Graph(rows, _):
            return tuple([item for row in rows for item, _ in row])
        case Difference(item, minus):
            return item, minus
        case _:
            return ()


def graph(rows: Sequence[Sequence[tuple[Node, int]]], accepting: Iterable[int]) -> Node:
    """A walk from state 0 to an accepting state, without dead ends; states that only pass on are joined."""
    final = frozenset(accepting)
    edges = [[edge for edge in row if type(edge[0]) is not Alternation or edge[0].items] for row in rows]
    sources = _sources(edges)
    is_alive, work = [False] * len(edges), list(final)
    for state in work:
        is_alive[state] = True
    while work:
        for state in sources[work.pop()]:
            if not is_alive[state]:
                is_alive[state] = True
                work.append(state)
    if not is_alive[0]:
        return NOTHING
    if not all(is_alive):
        edges = [[edge for edge in row if is_alive[edge[1]]] for row in edges]
        sources = _sources(edges)
    passes = [
        len(row) == 1 and state not in final and (len(sources[state]) == 1 or type(row[0][0]) is Empty)
        for state, row in enumerate(edges)
    ]
    numbers, order = {0: 0}, [0]
    kept: list[tuple[tuple[Node, int], ...]] = []
    for state in order:
        ways: list[tuple[Node, int]] = []
        for node, target in edges[state]:
            if target and passes[target]:
                parts = [] if type(node) is Empty else [node]
                num_passed = 0
                while target and passes[target] and num_passed < len(edges):
                    after, target = edges[target][0]
                    num_passed += 1
                    if type(after) is not Empty:
                        parts.append(after)
                node = parts[0] if len(parts) == 1 else concat(*parts)
            if target not in numbers:
                numbers[target] = len(order)
                order.append(target)
            ways.append((node, numbers[target]))
        if len(ways) > 1 and len({target for _, target in ways}) < len(ways):  # nodes take long to hash
            ways = list(dict.fromkeys(ways))
        kept.append(tuple(ways))
    ends = frozenset(numbers[state] for state in final if state in numbers)
    if len(kept) == 2 and ends == {1} and not kept[1]:
        return alternation(*(node for node, _ in kept[0]))
    return EMPTY if len(kept) == 1 and not kept[0] else Graph(tuple(kept), ends)


def _sources(edges: list[list[tuple[Node, int]]]) -> list[list[int]]:
    """The states that edges come from, by the state that they lead to."""
    found: list[list[int]] = [[] for _ in edges]
    for state, row in enumerate(edges):
        for _, target in row:
            found[target].append(state)
    return found


def nullable(node: Node) -> bool:
    """Does `node` match the empty text?"""
    match node:
        case Empty():
            return True
        case Literal() | CharSet():
            return False
        case Concat(items):
            return all(nullable(item) for item in items)
        case Alternation(items):
            return any(nullable(item) for item in items)
        case Repeat(item, minimum, _):
            return minimum == 0 or nullable(item)
        case Graph(rows, accepting):
            reached, work = {0}, [0]
            while work:
                for item, target in rows[work.pop()]:
                    if target not in reached and nullable(item):
                        reached.add(target)
                        work.append(target)
            return bool(reached & accepting)
        case Intersection(items):
            return all(nullable(item) for item in items)
        case Difference(item, minus):
            return nullable(item) and not nullable(minus)
        case Automaton():
            return 0 in node.ends
        case Rule():
            return False
