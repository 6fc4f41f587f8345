"""Kinds: those that a shape may have, and which pairs of alternatives may share a value."""

from __future__ import annotations

from graftlm.core.grammar.schema.algebra.kinds import (
    KINDS,
    KindsBehind,
    objects_apart,
    pairs_to_compare,
    plainly_apart,
    tells_kinds_apart,
)
from graftlm.core.grammar.schema.algebra.shapes import (
    ANYTHING,
    NOTHING,
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


def test_an_object_is_apart_from_one_that_forbids_a_member_that_it_needs() -> None:
    needs = Object((("a", Text()),), required=("a",))
    closed = Object((("b", Text()),), additional=NOTHING)
    assert plainly_apart(needs, closed)
    assert plainly_apart(closed, needs)
    assert plainly_apart(needs, Object((("a", NOTHING),)))
    assert not plainly_apart(needs, Object((("b", Text()),)))
    assert not plainly_apart(needs, Object((("a", Text()),), additional=NOTHING))
    assert not plainly_apart(needs, Object(patterns=(("^a", Text()),), additional=NOTHING))
    assert not plainly_apart(Object((("a", Text()),)), closed)  # neither needs anything


def test_objects_are_apart_where_one_needs_another_constant_than_the_other_allows() -> None:
    one = Object((("kind", Literals(('"x"',))),), required=("kind",))
    other = Object((("kind", Literals(('"y"', '"z"'))),))
    assert plainly_apart(one, other)
    assert plainly_apart(other, one)
    assert not plainly_apart(other, Object((("kind", Literals(('"x"',))),)))  # {} has both
    assert objects_apart(Implied(one), Implied(other))
    assert not plainly_apart(Implied(one), Implied(other))  # by the standard 1 has both
    assert not objects_apart(Implied(one), Text())


def test_two_parts_that_may_be_objects_are_not_told_apart_by_kinds() -> None:
    assert tells_kinds_apart([Object(), Array(), Text(), Text()])
    assert not tells_kinds_apart([Object(), union(Text(), Object())])
    assert not tells_kinds_apart([Array(), Text(), Array()])
