"""Witnesses: strings that prove a language to be nonempty without building its automaton.

Compiling the 566 schemas of MaskBench is no faster with witnesses. They decide languages whose automaton exceeds the
limit of states: names with a format and a pattern, and long names with a pattern, are refused without them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from itertools import chain, islice

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.automata.dfa import UNREACHABLE
from graftlm.core.grammar.automata.matching import matches
from graftlm.core.grammar.automata.products import product
from graftlm.core.grammar.automata.products.plain_text import plain_text
from graftlm.core.grammar.nodes import nodes
from graftlm.core.grammar.nodes.nodes import Node

_STEPS = (0, 1, 2, 5, 9)
"""Bytes of a walk through an automaton before it takes the shortest way to the end."""
_LONG = 64
"""Bytes of a longer walk, where only long texts are asked for."""
_TURNS = 4
"""Walks of each length, which take other ways at the places that have several."""

_MAX_SOURCES = 16
"""Nodes that texts are read off where the automaton of the whole is too large."""


def has_witness(
    items: Sequence[Node],
    minus: Sequence[Node],
    texts: Collection[bytes],
    low: int = 0,
    high: int | None = None,
    *,
    at_once: bool = False,
) -> bool:
    """Whether one of a few texts of the first of `items` is in all of them, in none of `minus` and not in `texts`.

    low, high  characters that it has
    at_once    ask the other nodes themselves, not their automata: faster where each is asked for few texts

    False does not tell that there is none.
    """
    accepts = _matches if at_once else _accepts
    try:
        return any(
            data not in texts
            and low <= len(data.decode()) <= (len(data) if high is None else high)
            and all(accepts(item, data) for item in items[1:])
            and not any(accepts(item, data) for item in minus)
            for data in _tried(items, low, joined=at_once)
        )
    except GrammarError:  # an automaton is too large
        return False


def has_witness_in_parts(items: Sequence[Node], minus: Sequence[Node], texts: Collection[bytes], low: int = 0) -> bool:
    """The same where the automaton of an item is too large: texts are read off what it combines, or off its node.

    low  characters that a text of all items has at least
    """
    sources = islice(chain.from_iterable(map(_sources, items)), _MAX_SOURCES)
    return any(
        data not in texts
        and all(_matches(item, data) for item in items)
        and not any(_matches(item, data) for item in minus)
        for source in sources
        for data in _texts(source, low)
    )


def _sources(node: Node) -> Iterator[Node]:
    """What `node` combines, or itself."""
    match node:
        case nodes.Intersection(items) | nodes.Alternation(items):
            yield from chain.from_iterable(map(_sources, items))
        case nodes.Difference(item, _):
            yield from _sources(item)
        case _:
            yield node


def _texts(node: Node, low: int) -> Iterator[bytes]:
    for times in sorted({0, 1, 2, low}):
        text = plain_text(node, times)
        if text is not None:
            yield text.encode()
    with suppress(GrammarError):
        yield from _samples(node, low)


def _tried(items: Sequence[Node], low: int, *, joined: bool) -> Iterator[bytes]:
    """Texts of the first item; with `joined` also some that have one of the second in them."""
    first = _samples(items[0], low if low <= _LONG else 0)
    yield from first
    if joined and len(items) > 1 and first and (others := _samples(items[1], 0)):
        both = (first[0] + others[0], others[0] + first[0])
        yield from (data for data in both if _accepts(items[0], data))


@lru_cache(maxsize=256)
def _samples(node: Node, length: int) -> tuple[bytes, ...]:
    """Some texts of `node`, of them some of `length` bytes or more; none where there is none."""
    table = product.table(node)
    distances: list[int] = table.distances().tolist()
    if distances[1] == UNREACHABLE:
        return ()
    classes: list[int] = table.classes.tolist()
    ends = sorted({*{c: byte for byte, c in enumerate(classes)}.values(), *map(classes.index, set(classes))})

    @cache
    def ways(state: int) -> list[tuple[int, int]]:
        """The first and the last byte of each class that leads on, and where to."""
        row = table.targets[state].tolist()
        return [(byte, row[classes[byte]]) for byte in ends if distances[row[classes[byte]]] < UNREACHABLE]

    def walk(steps: int, turn: int) -> bytes:
        data, state = bytearray(), 1
        for place in range(steps):
            found = ways(state)
            if not found:
                break
            byte, state = found[(turn * len(found) // _TURNS + place * turn) % len(found)]
            data.append(byte)
        while distances[state]:
            byte, state = min(ways(state), key=lambda way: distances[way[1]])
            data.append(byte)
        return bytes(data)

    return tuple(dict.fromkeys([walk(steps, turn) for steps in sorted({*_STEPS, length}) for turn in range(_TURNS)]))


@lru_cache(maxsize=8192)
def _accepts(node: Node, data: bytes) -> bool:
    return product.table(node).accepts(data)


@lru_cache(maxsize=8192)
def _matches(node: Node, data: bytes) -> bool:
    return matches(node, data.decode())
