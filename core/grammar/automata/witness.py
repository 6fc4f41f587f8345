"""A witness: one text that shows that a language is not empty, found without the automaton of the language."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.ast import Node
from graftlm.core.grammar.automata import product
from graftlm.core.grammar.automata.dfa import UNREACHABLE

_STEPS = (0, 1, 2, 5, 9)
"""Bytes of a walk through an automaton before it takes the shortest way to the end."""
_TURNS = 4
"""Walks of each length, which take other ways at the places that have several."""


def has_witness(items: Sequence[Node], minus: Sequence[Node], texts: Collection[bytes]) -> bool:
    """Whether one of a few texts of the first of `items` is in all of them, in none of `minus` and not in `texts`.

    False does not tell that there is none.
    """
    try:
        return any(
            data not in texts
            and all(_accepts(item, data) for item in items[1:])
            and not any(_accepts(item, data) for item in minus)
            for data in _samples(items[0])
        )
    except GrammarError:  # an automaton is too large
        return False


@lru_cache(maxsize=256)
def _samples(node: Node) -> tuple[bytes, ...]:
    """Some texts of `node`; none where there is none."""
    table = product.table(node)
    distances: list[int] = table.distances().tolist()
    if distances[1] == UNREACHABLE:
        return ()
    classes: list[int] = table.classes.tolist()
    ends = sorted({*{c: byte for byte, c in enumerate(classes)}.values(), *map(classes.index, set(classes))})

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

    return tuple(dict.fromkeys([walk(steps, turn) for steps in _STEPS for turn in range(_TURNS)]))


@lru_cache(maxsize=8192)
def _accepts(node: Node, data: bytes) -> bool:
    return product.table(node).accepts(data)
