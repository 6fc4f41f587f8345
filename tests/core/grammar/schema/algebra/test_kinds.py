"""Kinds: those that a shape may have, and which pairs of alternatives may share a value."""

from __future__ import annotations

from graftlm.core.grammar.schema.algebra.kinds import KINDS, KindsBehind, pairs_to_compare
from graftlm.core.grammar.schema.algebra.shapes import (
    ANYTHING,
    Array,
    ExactlyOne,
    Implied,
    Literals,
    Not,
    Number,
    Object,
    Reference,
    Shape,
    Text,
    both,
    union,
)


def test_constants_that_differ_are_no_pair() -> None:
    thousands: list[Shape] = [Literals((f'"{i}"',)) for i in range(20_000)]  # all pairs of these took minutes
    assert list(pairs_to_compare([*thousands, Literals(("7",)), Literals(('"7"', "8"))])) == [(7, 20_001)]


def test_numbers_that_have_several_spellings_and_other_shapes_are_compared_with_all() -> None:
    shapes: list[Shape] = [Literals(("1",)), Literals(("1.0",)), Literals(("2",)), Text()]
    assert list(pairs_to_compare(shapes)) == [(0, 1), (0, 3), (1, 2), (1, 3), (2, 3)]


def test_kinds_are_known_behind_references() -> None:
    targets: dict[str, Shape] = {
        "object": Object(),
        "list": union(Array(), Reference("list")),  # which leads back to itself
        "one": ExactlyOne((Reference("object"), Text())),
    }
    kinds = KindsBehind(targets.__getitem__, standard=False)
    assert kinds(Reference("one")) == {"object", "string"}
    assert kinds(both(Reference("one"), union(Reference("object"), Number()))) == {"object"}
    assert kinds(both(Reference("object"), Array())) == frozenset()
    assert "array" in kinds(Reference("list"))
    assert kinds(Not(Object())) == kinds(ANYTHING) == set(KINDS)


def test_an_implied_type_leaves_the_other_kinds_to_the_standard() -> None:
    implied = union(Implied(Object()), Text())
    kinds, by_the_standard = (KindsBehind({}.__getitem__, standard=standard) for standard in (False, True))
    assert kinds(implied) == {"object", "string"} and by_the_standard(implied) == set(KINDS)
    assert kinds.met_implied and by_the_standard.met_implied
    assert not KindsBehind({}.__getitem__, standard=False).met_implied
