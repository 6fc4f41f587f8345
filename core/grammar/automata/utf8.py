"""Sets of code points as a graph over UTF-8 bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from graftlm.core.grammar.nodes.nodes import Range

ByteRange = tuple[int, int]


@dataclass(frozen=True)
class ByteGraph:
    """An automaton over bytes: edge i goes from sources[i] to targets[i] on bytes lows[i] to highs[i].

    Node 0 is the start, into which no edge leads; node 1 the end.
    """

    num_nodes: int
    sources: tuple[int, ...]
    lows: tuple[int, ...]
    highs: tuple[int, ...]
    targets: tuple[int, ...]

    def step(self, node: int, byte: int) -> int | None:
        """The node after `byte`; None where it is not allowed."""
        for low, high, target in self._edges.get(node, ()):
            if low <= byte <= high:
                return target
        return None

    @cached_property
    def _edges(self) -> dict[int, list[tuple[int, int, int]]]:
        edges: dict[int, list[tuple[int, int, int]]] = {}
        for source, low, high, target in zip(self.sources, self.lows, self.highs, self.targets, strict=True):
            edges.setdefault(source, []).append((low, high, target))
        return edges


def byte_sequences(low: int, high: int) -> Iterator[tuple[ByteRange, ...]]:
    """Split code points `low` to `high` into sequences of byte ranges, in order; surrogates are left out."""
    stack = [(low, high)]
    while stack:
        low, high = stack.pop()
        if low > high:
            continue
        parts = _split(low, high)
        if parts is not None:
            stack += reversed(parts)
            continue
        first, last = chr(low).encode(), chr(high).encode()
        yield tuple(zip(first, last, strict=True))


def _split(low: int, high: int) -> list[Range] | None:
    """Parts of a range that one sequence cannot express; None if one can."""
    if low < 0xE000 and high > 0xD7FF:
        return [(low, 0xD7FF), (0xE000, high)]
    for limit in (0x7F, 0x7FF, 0xFFFF):  # the last code point of one, two and three bytes
        if low <= limit < high:
            return [(low, limit), (limit + 1, high)]
    if high <= 0x7F:
        return None
    for i in range(1, 2 if high <= 0x7FF else 3 if high <= 0xFFFF else 4):
        tail = (1 << (6 * i)) - 1  # what the last i continuation bytes carry
        if low & ~tail != high & ~tail:
            if low & tail:
                return [(low, low | tail), ((low | tail) + 1, high)]
            if high & tail != tail:
                return [(low, (high & ~tail) - 1), (high & ~tail, high)]
    return None


@lru_cache(maxsize=512)
def byte_graph(ranges: tuple[Range, ...]) -> ByteGraph:
    """The smallest graph without loops that spells the code points of `ranges`: equal tails are shared."""
    graph = _Graph()
    graph.node([sequence for low, high in ranges for sequence in byte_sequences(low, high)], True)
    columns = tuple(zip(*graph.edges, strict=True)) if graph.edges else ((), (), (), ())
    return ByteGraph(len(graph.nodes) + 2, *columns)


class _Graph:
    """A graph under construction: nodes by the edges that leave them, and all edges with where they come from."""

    def __init__(self) -> None:
        self.nodes: dict[tuple[tuple[int, int, int], ...], int] = {}
        self.edges: list[tuple[int, int, int, int]] = []

    def node(self, sequences: list[tuple[ByteRange, ...]], start: bool) -> int:
        """The node from which on there are these sequences, which are in order."""
        out: list[tuple[int, int, int]] = []
        i = 0
        while i < len(sequences):
            first = sequences[i][0]
            j = i
            while j < len(sequences) and sequences[j][0] == first:
                j += 1
            rest = [sequence[1:] for sequence in sequences[i:j]]
            target = 1 if rest == [()] else self.node(rest, False)
            if out and out[-1][2] == target and out[-1][1] + 1 == first[0]:
                out[-1] = (out[-1][0], first[1], target)
            else:
                out.append((first[0], first[1], target))
            i = j
        key = tuple(out)
        if start:
            number = 0
        elif key in self.nodes:
            return self.nodes[key]
        else:
            number = self.nodes[key] = len(self.nodes) + 2
        self.edges.extend((number, *edge) for edge in out)
        return number
