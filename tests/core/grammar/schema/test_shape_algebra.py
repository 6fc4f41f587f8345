"""Shapes meet, are found empty, and admit values: laws over shapes made at random."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.schema.shape_algebra import ShapeAlgebra, same_value
from graftlm.core.grammar.schema.shapes import (
    ANYTHING,
    NOTHING,
    Array,
    Boolean,
    ExactlyOne,
    Literals,
    Null,
    Number,
    Object,
    Reference,
    Shape,
    Text,
    union,
)

NAMES = st.sampled_from(["a", "b", "x1"])
BOUND = st.none() | st.integers(-2, 4).map(Decimal)
LEAVES: st.SearchStrategy[Shape] = st.one_of(
    st.sampled_from([ANYTHING, NOTHING, Null(), Boolean(), Text(patterns=("^a",)), Text(1, 2)]),
    st.builds(Number, st.booleans(), BOUND, BOUND, st.booleans(), st.booleans()),
    st.lists(st.sampled_from(["1", "2.5", '"a"', '"b"', "null", "[1]", '{"a":1}']), min_size=1).map(
        lambda texts: Literals(tuple(texts))
    ),
)


def _compound(inner: st.SearchStrategy[Shape]) -> st.SearchStrategy[Shape]:
    several = st.lists(inner, min_size=1, max_size=2).map(tuple)
    return st.one_of(
        st.builds(Array, several, inner, st.integers(0, 2), st.none() | st.integers(0, 3)),
        st.builds(
            Object,
            properties=st.dictionaries(NAMES, inner, max_size=2).map(lambda d: tuple(d.items())),
            patterns=st.just(()) | inner.map(lambda shape: (("^x", shape),)),
            additional=inner,
            required=st.lists(NAMES, max_size=1).map(tuple),
            max_properties=st.none() | st.integers(0, 2),
        ),
        several.map(lambda shapes: union(*shapes)),
        several.map(lambda shapes: ExactlyOne(shapes)),
    )


SHAPES = st.recursive(LEAVES, _compound, max_leaves=5)
SCALARS = st.none() | st.booleans() | st.integers(-3, 5) | st.sampled_from([Decimal("2.5"), "a", "b", "aaa", ""])
VALUES = st.recursive(
    SCALARS, lambda v: st.lists(v, max_size=2) | st.dictionaries(NAMES | st.just("z"), v, max_size=2), max_leaves=3
)


def unreachable(target: str) -> Shape:
    raise AssertionError(target)


@settings(max_examples=100, deadline=None)
@given(SHAPES, SHAPES, st.lists(VALUES, min_size=8, max_size=16))
def test_a_value_is_in_both_shapes_when_it_is_in_their_intersection(a: Shape, b: Shape, values: list[Any]) -> None:
    algebra = ShapeAlgebra(unreachable)
    both = algebra.intersect(a, b)
    for value in values:
        in_both = algebra.admits(a, value) and algebra.admits(b, value)
        assert algebra.admits(both, value) == in_both, (a, b, value)
        assert not (in_both and algebra.is_nothing(both))


@pytest.mark.parametrize(
    "shape",
    [
        NOTHING,
        Number(minimum=Decimal(3), maximum=Decimal(2)),
        Number(True, Decimal(3), Decimal(4), True, True),
        Number(multiple_of=(Decimal(7),), minimum=Decimal(8), maximum=Decimal(13)),
        Text(3, 2),
        Text(patterns=("^a$", "^b$")),
        Text(patterns=("^a{3}$",), max_length=2),
        Array(prefix=(NOTHING,), min_items=1),
        Array(items=NOTHING, min_items=1),
        Object(properties=(("a", NOTHING),), required=("a",)),
        Object(required=("a", "b"), max_properties=1),
        Object(names=Text(max_length=1), required=("ab",)),
    ],
)
def test_a_shape_without_values_is_found_empty(shape: Shape) -> None:
    assert ShapeAlgebra(unreachable).is_nothing(shape)


def test_values_are_equal_as_json_schema_has_it() -> None:
    assert same_value(1, Decimal("1.0")) and same_value({"a": 1, "b": [1]}, {"b": [Decimal(1)], "a": 1})
    assert not same_value(1, True) and not same_value([1], [True]) and not same_value({"a": 1}, {"a": 1, "b": 2})


def test_a_definition_that_contains_itself_meets_other_keywords_as_far_as_it_ends() -> None:
    shapes: dict[str, Shape] = {"/list": union(Null(), Array(items=Reference("/list")))}
    algebra = ShapeAlgebra(shapes.__getitem__)
    assert algebra.intersect(Reference("/list"), Null()) == Null()
    shapes["/deep"] = Array(items=Reference("/deep"))
    with pytest.raises(GrammarError, match="cannot be combined"):
        algebra.intersect(Reference("/deep"), Array(items=Reference("/list")))


def test_too_many_alternatives_are_refused() -> None:
    many = union(*(Text(patterns=(f"^{i}$",)) for i in range(60)))
    with pytest.raises(GrammarError, match="more than 2000"):
        ShapeAlgebra(unreachable).intersect(many, union(*(Text(patterns=(f"{i}$",)) for i in range(60))))
