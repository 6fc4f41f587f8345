"""The names that an object does not list, as a byte automaton: the trie of those it lists, and what leaves it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, lru_cache

from graftlm.core.grammar import ast
from graftlm.core.grammar.automata.products import product
from graftlm.core.grammar.schema.text import json_text

_FREE = 1

_Edges = tuple[tuple[int, int, int], ...]
"""Lowest and highest byte, and the state that they lead to."""


def names_but(names: Iterable[str]) -> ast.Automaton:
    """The automaton of `json_text.other_names`; `names` has at least one."""
    shared = _text().rows  # what follows once a text has left the trie, whose first state is theirs too
    rows: list[dict[int, int]] = [{}]
    within = [0]  # where the bytes of the character at hand lead to: 0 between characters
    ends: set[int] = set()
    for name in names:
        state = 0
        for byte in json_text.bytes_inside(name):
            after = rows[state].get(byte)
            if after is None:
                after = rows[state][byte] = len(rows)
                rows.append({})
                within.append(_places_after(within[state])[byte])
            state = after
        ends.add(state)
    before = len(shared) - 1
    trie = []
    for place, row in zip(within, rows, strict=True):
        if len(row) == 1:
            ((byte, to),) = row.items()
            below, above = _around(place, byte)
            trie.append((*below, (byte, byte, before + to), *above))
        else:
            ways = [(byte, byte, before + to) for byte, to in row.items()]
            trie.append(tuple(sorted([*_leaving(place, tuple(row)), *ways])))
    between = [state for state, place in enumerate(within) if not place and state not in ends]
    accepting = [state + before if state else 0 for state in between]
    return ast.Automaton((trie[0], *shared[1:], *trie[1:]), frozenset([_FREE, *accepting]))


@cache
def _text() -> ast.Automaton:
    """One character of a name, then free text: state 0 comes before, `_FREE` after a character."""
    found = product.product(ast.concat(json_text.NAME_CHAR, ast.star(json_text.TEXT_CHAR)))
    assert found.rows[0][0] == (0x20, 0x21, _FREE)
    return found


@cache
def _places_after(place: int) -> list[int]:
    """The state to which each byte of a character leads; 0 after the last one, and for a byte that none has."""
    found = [0] * 256
    for low, high, target in _text().rows[place]:
        if target != _FREE:
            found[low : high + 1] = [target] * (high + 1 - low)
    return found


@lru_cache(maxsize=4096)
def _around(state: int, child: int) -> tuple[_Edges, _Edges]:
    """The edges of `_leaving` for one child: those on lower bytes, and those on higher ones."""
    edges = _leaving(state, (child,))
    return tuple([edge for edge in edges if edge[1] < child]), tuple([edge for edge in edges if edge[0] > child])


@lru_cache(maxsize=4096)
def _leaving(state: int, children: tuple[int, ...]) -> _Edges:
    """The edges of a state of `_text` without the bytes of `children`."""
    edges = []
    for low, high, target in _text().rows[state]:
        for byte in sorted(children):
            if low <= byte <= high:
                edges.append((low, byte - 1, target))
                low = byte + 1
        edges.append((low, high, target))
    return tuple((low, high, target) for low, high, target in edges if low <= high)
