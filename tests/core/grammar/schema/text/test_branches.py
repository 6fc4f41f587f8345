"""What a value decides about a formula of shapes."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from graftlm.core.grammar.schema.algebra.shapes import (
    ANYTHING,
    NOTHING,
    Both,
    Literals,
    Not,
    Object,
    Shape,
    Text,
    Union,
    both,
    union,
)
from graftlm.core.grammar.schema.text import branches
from graftlm.core.grammar.schema.text.branches import Question, branch, decide, leaf_set

A, B, C = (Object(required=(name,)) for name in "abc")


def _same(shape: Shape) -> Shape:
    return shape


def _unless(text: str, leaf: Shape) -> Question:
    """`leaf` fails unless the value is this string."""
    return Question(Literals((f'"{text}"',)), frozenset({leaf}))


def test_each_string_that_decides_leaves_its_own_alternative() -> None:
    found = list(branch(union(A, B), [_unless("x", A), _unless("y", B)], _same))
    assert found == [(Literals(('"x"',)), (A, ())), (Literals(('"y"',)), (B, ()))]


def test_a_value_that_no_question_names_leaves_what_does_not_ask() -> None:
    found = dict(branch(union(A, B, C), [_unless("x", A), _unless("y", B)], _same))
    assert found[Not(Literals(('"x"', '"y"')))] == (C, ())
    assert found[Literals(('"x"',))] == (union(A, C), ())


def test_strings_that_decide_nothing_are_not_told_apart() -> None:
    assert list(branch(C, [_unless("x", A), _unless("y", B)], _same)) == [(ANYTHING, (C, ()))]


def test_strings_that_leave_the_same_are_one_case() -> None:
    asked = [_unless("x", A), Question(Literals(('"y"', '"z"')), frozenset({B}))]
    assert list(branch(union(A, B), asked, _same))[1] == (Literals(('"y"', '"z"')), (B, ()))


def test_other_questions_come_after_the_strings() -> None:
    asked = [Question(Text(), frozenset({C})), _unless("x", A), _unless("y", B)]
    found = list(branch(union(A, B, C), asked, _same))
    assert [left for _, (left, _) in found] == [union(A, C), A, union(B, C), B, C]


def test_hundreds_of_strings_are_reduced_once() -> None:
    reduced: list[Shape] = []

    def reduce(shape: Shape) -> Shape:
        reduced.append(shape)
        return shape

    leaves = [Object(required=(str(i),)) for i in range(300)]
    asked = [_unless(str(i), leaf) for i, leaf in enumerate(leaves)]
    assert len(list(branch(union(*leaves, C), asked, reduce))) == 301
    assert len(reduced) == 1


def test_leaves_are_decided_together() -> None:
    assert decide(union(A, B, C), frozenset({A, C}), False) == B
    assert decide(union(A, B), frozenset({B}), True) == ANYTHING
    assert decide(A, frozenset({B}), False) == A


def test_strings_that_fail_a_part_which_all_must_have_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    formulas: list[Shape] = []

    def counted(formula: Shape, some: frozenset[Shape], hold: bool) -> Shape:
        formulas.append(formula)
        return decide(formula, some, hold)

    monkeypatch.setattr(branches, "decide", counted)
    leaves = [Object(required=(str(i),)) for i in range(300)]
    only_first = both(leaves[0], *map(Not, leaves[1:]))
    found = list(branch(only_first, [_unless(str(i), leaf) for i, leaf in enumerate(leaves)], _same))
    assert found == [(Literals(('"0"',)), (leaves[0], ()))]
    assert len(formulas) == 2


_FLAT_PARTS = st.lists(
    st.sampled_from([A, B, C, Object(required=("d",))]).flatmap(lambda leaf: st.sampled_from([leaf, Not(leaf)])),
    min_size=2,
    max_size=6,
    unique=True,
)


@given(_FLAT_PARTS, st.booleans(), st.frozensets(st.sampled_from([A, B, C])), st.booleans())
def test_a_formula_of_leaves_is_decided_part_by_part(
    parts: list[Shape], is_union: bool, some: frozenset[Shape], hold: bool
) -> None:
    def decided(part: Shape) -> Shape:
        leaf = part.shape if isinstance(part, Not) else part
        return part if leaf not in some else ANYTHING if hold != isinstance(part, Not) else NOTHING

    formula, join = (Union(tuple(parts)), union) if is_union else (Both(tuple(parts)), both)
    for _ in range(2):  # what is left is decided as well
        assert decide(formula, some, hold) == join(*map(decided, parts))
        some |= {Object(required=("d",))}


def _formula(parts: list[Shape], is_union: bool) -> Shape:
    return Union(tuple(parts)) if is_union else Both(tuple(parts))


_NESTED = st.recursive(
    st.sampled_from([A, B, C, Not(A), Not(B), Not(C)]),
    lambda inner: st.builds(_formula, st.lists(inner, min_size=2, max_size=4, unique=True), st.booleans()),
    max_leaves=12,
)


@given(_NESTED, st.frozensets(st.sampled_from([A, B, C])), st.booleans())
def test_a_formula_of_formulas_holds_as_before_once_some_leaves_are_decided(
    formula: Shape, some: frozenset[Shape], hold: bool
) -> None:
    def holds(part: Shape, true: set[Shape]) -> bool:
        match part:
            case Union(parts):
                return any(holds(one, true) for one in parts)
            case Both(parts):
                return all(holds(one, true) for one in parts)
            case Not(inner):
                return inner not in true
        return part == ANYTHING or part in true

    left = decide(formula, some, hold)
    assert leaf_set(left).isdisjoint(some)
    for true in ({A}, {B}, {C}, {A, B}, {A, C}, {B, C}, {A, B, C}, set[Shape]()):
        assert holds(left, set(true)) == holds(formula, true | some if hold else true - some)
