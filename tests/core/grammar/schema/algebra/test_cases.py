"""Cases: shapes of one kind as a union of intersections, and where there are too many to list."""

from __future__ import annotations

from graftlm.core.grammar.schema.algebra.cases import MAX_PAIRS, Cases
from graftlm.core.grammar.schema.algebra.shapes import Not, Object, Shape, both, union


def named(i: int) -> Object:
    return Object(required=(f"member {i}",))


def test_a_union_and_what_it_excludes_are_joined_case_by_case() -> None:
    excluded = Not(named(2))
    assert Cases().of(both(union(named(0), named(1)), excluded)) == [(named(0), excluded), (named(1), excluded)]


def test_many_cases_with_many_exclusions_are_not_listed() -> None:
    alternatives = union(*map(named, range(100)))
    excluded: list[Shape] = [Not(named(1000 + i)) for i in range(MAX_PAIRS // 100 + 1)]
    assert len(Cases().of(both(alternatives, excluded[0])) or ()) == 100
    assert Cases().of(both(alternatives, *excluded)) is None  # 100 x 41 joined tuples took seconds where they nested


def test_one_case_that_excludes_hundreds_is_joined_at_once() -> None:
    cases = Cases()
    excluded: list[Shape] = [Not(named(i)) for i in range(1, 300)]
    assert cases.of(both(named(0), *excluded)) == [(named(0), *excluded)]
    assert cases.of(both(named(7), *excluded)) == []
    assert not cases._joined  # pair by pair, 300 tuples of up to 300 shapes
