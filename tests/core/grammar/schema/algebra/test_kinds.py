"""Kinds: which pairs of alternatives may share a value."""

from __future__ import annotations

from graftlm.core.grammar.schema.algebra.kinds import pairs_to_compare
from graftlm.core.grammar.schema.algebra.shapes import Literals, Shape, Text


def test_constants_that_differ_are_no_pair() -> None:
    thousands: list[Shape] = [Literals((f'"{i}"',)) for i in range(20_000)]  # all pairs of these took minutes
    assert list(pairs_to_compare([*thousands, Literals(("7",)), Literals(('"7"', "8"))])) == [(7, 20_001)]


def test_numbers_that_have_several_spellings_and_other_shapes_are_compared_with_all() -> None:
    shapes: list[Shape] = [Literals(("1",)), Literals(("1.0",)), Literals(("2",)), Text()]
    assert list(pairs_to_compare(shapes)) == [(0, 1), (0, 3), (1, 2), (1, 3), (2, 3)]
