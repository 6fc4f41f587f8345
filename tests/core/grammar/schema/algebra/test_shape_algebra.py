"""Shapes are reduced to one kind, found empty, and admit values: laws over shapes made at random."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.schema.algebra.kinds import KINDS
from graftlm.core.grammar.schema.algebra.shape_algebra import ShapeAlgebra
from graftlm.core.grammar.schema.algebra.shapes import (
    ANYTHING,
    NOTHING,
    Array,
    Boolean,
    Both,
    ExactlyOne,
    Literals,
    Not,
    Null,
    Number,
    Object,
    Reference,
    Shape,
    Text,
    Union,
    both,
    union,
)
from graftlm.core.grammar.schema.algebra.values import same_value
from tests.grammars import allows, compiled

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
        several.map(lambda shapes: both(*shapes)),
        several.map(ExactlyOne),
        inner.map(Not),
    )


SHAPES = st.recursive(LEAVES, _compound, max_leaves=5)
SCALARS = st.none() | st.booleans() | st.integers(-3, 5) | st.sampled_from([Decimal("2.5"), "a", "b", "aaa", ""])
VALUES = st.recursive(
    SCALARS, lambda v: st.lists(v, max_size=2) | st.dictionaries(NAMES | st.just("z"), v, max_size=2), max_leaves=3
)


def unreachable(target: str) -> Shape:
    raise AssertionError(target)


def kind_of(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return {str: "string", list: "array", dict: "object"}.get(type(value), "number")


@settings(max_examples=150)
@given(SHAPES, st.lists(VALUES, min_size=8, max_size=16))
def test_a_shape_reduced_to_a_kind_admits_the_same_values_of_that_kind(shape: Shape, values: list[Any]) -> None:
    algebra = ShapeAlgebra(unreachable)
    for value in values:
        admitted, kind = algebra.admits(shape, value), kind_of(value)
        assert algebra.admits(algebra.narrow(shape, kind), value) == admitted
        assert algebra.admits(algebra.narrow(shape, kind, positive=False), value) != admitted
        if kind in ("number", "string"):
            assert any(algebra.admits(piece, value) for piece in algebra.pieces(shape, kind)) == admitted
        assert not (admitted and algebra.is_nothing(shape)), (shape, value)


@settings(max_examples=100)
@given(SHAPES, st.lists(VALUES, min_size=8, max_size=16))
def test_a_value_is_in_a_shape_when_it_is_in_one_of_its_cases(shape: Shape, values: list[Any]) -> None:
    algebra = ShapeAlgebra(unreachable)
    for value in values:
        cases = algebra.cases.of(algebra.narrow(shape, kind_of(value)))
        if cases is not None:
            in_one = any(all(algebra.admits(part, value) for part in case) for case in cases)
            assert in_one == algebra.admits(shape, value)


@pytest.mark.parametrize(
    "shape",
    [
        NOTHING,
        Number(minimum=Decimal(3), maximum=Decimal(2)),
        Number(True, Decimal(3), Decimal(4), True, True),
        Number(multiple_of=(Decimal(7),), minimum=Decimal(8), maximum=Decimal(13)),
        Both((Number(integer=True), Number(no_multiple_of=(Decimal("0.5"),)))),
        Text(3, 2),
        Text(patterns=("^a$", "^b$")),
        Text(patterns=("^a{3}$",), max_length=2),
        Text(patterns=("^a+$",), no_patterns=("a",)),
        Array(prefix=(NOTHING,), min_items=1),
        Array(items=NOTHING, min_items=1),
        Object(properties=(("a", NOTHING),), required=("a",)),
        Object(required=("a", "b"), max_properties=1),
        Object(names=Text(max_length=1), required=("ab",)),
        Both((Null(), Not(Null()))),
        Both((Object(required=("a",)), Not(Object(required=("a",))))),
        ExactlyOne((Null(), Null())),
    ],
)
def test_a_shape_without_values_is_found_empty(shape: Shape) -> None:
    assert ShapeAlgebra(unreachable).is_nothing(shape)


def test_values_are_equal_as_json_schema_has_it() -> None:
    assert same_value(1, Decimal("1.0")) and same_value({"a": 1, "b": [1]}, {"b": [Decimal(1)], "a": 1})
    assert not same_value(1, True) and not same_value([1], [True]) and not same_value({"a": 1}, {"a": 1, "b": 2})


def test_a_definition_may_contain_itself_but_not_be_itself() -> None:
    shapes: dict[str, Shape] = {"/list": union(Null(), Array(items=Reference("/list")))}
    algebra = ShapeAlgebra(shapes.__getitem__)
    assert [kind for kind in KINDS if algebra.narrow(Reference("/list"), kind) != NOTHING] == ["null", "array"]
    shapes["/loop"] = union(Null(), Reference("/loop"))
    with pytest.raises(GrammarError, match="part of itself") as caught:
        algebra.narrow(Reference("/loop"), "null")
    assert caught.value.pointer == "/loop"


def test_too_many_pieces_are_refused() -> None:
    many = Union(tuple(Text(patterns=(f"^{i}$",)) for i in range(60)))
    with pytest.raises(GrammarError, match="more than 2,000"):
        ShapeAlgebra(unreachable).pieces(
            both(many, Union(tuple(Text(patterns=(f"{i}$",)) for i in range(60)))), "string"
        )


def test_alternatives_of_other_constants_are_told_apart_at_a_glance() -> None:
    algebra = ShapeAlgebra({}.__getitem__)
    members = [Object(properties=(("kind", Literals((f'"{i}"',))),), required=("kind",)) for i in range(60)]
    constants = [Literals((f'"{i}"',)) for i in range(60)]
    for parts in (members, constants):
        assert algebra.expanded(ExactlyOne(tuple(parts))) == Union(tuple(parts))
    assert len(algebra._narrowed) == 0


def test_alternatives_that_the_empty_object_has_are_compared_at_a_glance() -> None:
    tagged = [Object(properties=(("kind", Literals((f'"{i}"',))),)) for i in range(60)]
    algebra = ShapeAlgebra(dict(zip("ab", tagged, strict=False)).__getitem__)
    found = algebra.expanded(ExactlyOne((Reference("a"), Reference("b"), *tagged[2:])))
    assert isinstance(found, Union)
    assert [len(part.parts) for part in found.alternatives if isinstance(part, Both)] == [60] * 60
    assert not any(isinstance(shape, Both) for shape in algebra._empty)


def test_alternatives_that_ask_for_members_which_differ_are_apart() -> None:
    at_least = [Object(min_properties=1, max_properties=1), Object(min_properties=2)]
    empty = Object(max_properties=0)
    algebra = ShapeAlgebra({}.__getitem__)
    assert algebra.expanded(ExactlyOne((empty, *at_least))) == Union((empty, *at_least))


def test_alternatives_of_one_constant_are_not_apart() -> None:
    algebra = ShapeAlgebra({}.__getitem__)
    first, second = (
        Object(properties=(("kind", Literals(('"a"',))), (other, Null())), required=("kind",)) for other in "xy"
    )
    assert algebra.expanded(ExactlyOne((first, second))) != Union((first, second))


def test_a_one_of_whose_alternatives_hold_it_in_their_items_is_no_part_of_itself() -> None:
    several = {"type": "array", "items": {"$ref": "#/$defs/any"}, "minItems": 1}
    schema = {
        "$defs": {"any": {"oneOf": [{"$ref": "#/$defs/types"}]}, "types": {"oneOf": [{}, several]}},
        "properties": {"p": {"allOf": [{"oneOf": [{"$ref": "#/$defs/any"}]}]}},
        "patternProperties": {"p": {"not": {"const": 3}}},
    }
    grammar = compiled(schema, strict=False)
    texts = [f'{{"p":{value}}}' for value in ("2", "3", "[]", "[2]", "[[2]]")]
    assert [allows(grammar, text) for text in texts] == [True, False, True, False, True]
