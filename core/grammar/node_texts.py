"""The texts of a node, where they are few."""

from __future__ import annotations

from itertools import product

from graftlm.core.grammar import ast
from graftlm.core.grammar.ast import Node

MOST_TEXTS = 100
"""Texts that are written out; more count as many."""
_SURROGATES = range(0xD800, 0xE000)
"""No text in UTF-8 has these."""


def texts_of(node: Node) -> frozenset[str] | None:
    """The texts of `node`, as far as they show without an automaton; None where they are more than `MOST_TEXTS`."""
    match node:
        case ast.Empty():
            return frozenset({""})
        case ast.Literal(data):
            return frozenset({data.decode()})
        case ast.CharSet(ranges) if sum(high - low + 1 for low, high in ranges) <= MOST_TEXTS:
            codes = (code for low, high in ranges for code in range(low, high + 1))
            return frozenset([chr(code) for code in codes if code not in _SURROGATES])
        case ast.Alternation(items):
            found = [texts_of(item) for item in items]
            known = [texts for texts in found if texts is not None]
            return _few(frozenset[str]().union(*known)) if len(known) == len(found) else None
        case ast.Concat(items):
            return _joined(items)
        case ast.Repeat(item, low, high) if high is not None and high <= MOST_TEXTS:
            ways = (
                [_joined((item,) * count) for count in range(low, high + 1)] if texts_of(item) is not None else [None]
            )
            known = [texts for texts in ways if texts is not None]
            return _few(frozenset[str]().union(*known)) if len(known) == len(ways) else None
    return None


def _joined(items: tuple[Node, ...]) -> frozenset[str] | None:
    joined = frozenset({""})
    for item in items:
        found = texts_of(item)
        if found is None or len(joined) * len(found) > MOST_TEXTS:
            return None
        joined = frozenset(map("".join, product(joined, found)))
    return joined


def _few(texts: frozenset[str]) -> frozenset[str] | None:
    return texts if len(texts) <= MOST_TEXTS else None
