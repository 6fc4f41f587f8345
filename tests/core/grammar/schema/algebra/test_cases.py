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
