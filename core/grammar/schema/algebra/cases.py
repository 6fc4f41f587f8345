"""Cases: a shape of one kind as a union of intersections (its disjunctive normal form)."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from graftlm.core.grammar.budget import check
from graftlm.core.grammar.schema.algebra.shapes import Anything, Both, Not, Shape, Union

MAX_CASES = 64
MAX_PAIRS = 4096
"""How often a case is joined with one more shape before all of them are walked at once instead."""


class Cases:
    """The cases of shapes that are narrowed to one kind of JSON value, each listed once."""

    def __init__(self) -> None:
        self._known: dict[Shape, list[tuple[Shape, ...]] | None] = {}
        self._joined: dict[tuple[tuple[Shape, ...], tuple[Shape, ...]], tuple[Shape, ...] | None] = {}

    def of(self, narrowed: Shape) -> list[tuple[Shape, ...]] | None:
        """A narrowed shape as alternatives, each of several shapes (or Not) at once; None if they are too many."""
        if narrowed not in self._known:
            check()
            self._known[narrowed] = self._list(narrowed)
        return self._known[narrowed]

    def _list(self, narrowed: Shape) -> list[tuple[Shape, ...]] | None:
        match narrowed:
            case Anything():
                return [()]
            case Union(parts):
                joined = [self.of(part) for part in parts]
                if any(found is None for found in joined):
                    return None
                return list(dict.fromkeys(case for found in joined if found is not None for case in found))
            case Both(parts):
                factors = [self.of(part) for part in parts]
                sizes = [0 if factor is None else len(factor) for factor in factors]
                if prod(sizes) > MAX_CASES and prod(sizes) > max(sizes) or 0 in sizes:
                    return None
                if max(sizes) * len(factors) > MAX_PAIRS:  # of one factor with many, the others exclude something
                    return None
                if max(sizes) == 1:  # not pair by pair: each pair would copy all that was joined before
                    joined_all = _at_once([part for factor in factors for case in factor or () for part in case])
                    return [] if joined_all is None else [joined_all]
                product: list[tuple[Shape, ...]] = [()]
                for found in factors:
                    pairs = (self._combined(case, more) for case in product for more in found or ())
                    product = list(dict.fromkeys(case for case in pairs if case is not None))
                return product
            case _:
                return [(narrowed,)]

    def _combined(self, case: tuple[Shape, ...], more: tuple[Shape, ...]) -> tuple[Shape, ...] | None:
        """Both cases at once; None if one holds what the other excludes."""
        key = (case, more)
        if key not in self._joined:
            self._joined[key] = _at_once(case + more)
        return self._joined[key]


def _at_once(parts: Sequence[Shape]) -> tuple[Shape, ...] | None:
    """`parts` without repeats; None if one excludes another."""
    joined = dict.fromkeys(parts)
    excluded = any([isinstance(part, Not) and part.shape in joined for part in joined])
    return None if excluded else tuple(joined)
