"""Which `uniqueItems` a mask keeps: any other is an error with a pointer, or goes by `on_unsupported`."""

from __future__ import annotations

from typing import Any

import pytest

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.schema.unique_items import canonical, may_have_unique_parts
from graftlm.core.grammar.spec import JsonSchema
from tests.grammars import admits, allows, compiled

UNIQUE: dict[str, Any] = {"type": "array", "uniqueItems": True}
STRING = {"type": "string"}
NUMBERS = {"type": "object", "properties": {"a": {"type": "number"}}, "additionalProperties": False}
MIXED = {**NUMBERS, "additionalProperties": STRING, "maxProperties": 2}


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({**UNIQUE, "items": MIXED}, "/uniqueItems"),
        ({"properties": {"a~b": {**UNIQUE, "items": MIXED}}}, "/properties/a~0b/uniqueItems"),
        ({**UNIQUE, "prefixItems": [STRING, STRING]}, "/uniqueItems"),
        ({**UNIQUE, "items": STRING, "contains": {"const": "a"}}, "/uniqueItems"),
        (
            {"anyOf": [{**UNIQUE, "items": STRING}, {"type": "array", "items": {"type": "null"}, "minItems": 2}]},
            "/anyOf/0/uniqueItems",
        ),
        (
            {
                "anyOf": [
                    {**UNIQUE, "items": {"type": "array", "items": {"enum": [1]}, "maxItems": 1}},
                    {"type": "array"},
                ]
            },
            "/anyOf/0/uniqueItems",
        ),
        ({"items": {"const": [2.5]}, "type": "array", "uniqueItems": True}, "/uniqueItems"),
        (
            {
                "type": "object",
                "patternProperties": {"^[ab]$": STRING},
                "additionalProperties": False,
                "minProperties": 2,
            },
            "/minProperties",
        ),
    ],
)
def test_what_no_mask_keeps_is_refused_or_dropped_with_a_warning(schema: dict[str, Any], pointer: str) -> None:
    with pytest.raises(GrammarError, match="cannot be kept") as raised:
        compiled(schema, strict=False)
    assert raised.value.pointer == pointer
    assert [issue.pointer for issue in compiled(schema, strict=False, on_unsupported="warn").warnings] == [pointer]


@pytest.mark.parametrize(
    ("items", "minimum", "most"),
    [
        ({"enum": ["a", "b", "c"]}, 4, 3),
        ({"enum": [1, 1.0, 2]}, 3, 2),
        ({"type": "string", "pattern": "^[ab]{1,2}$"}, 7, 6),
        ({"type": "integer", "minimum": 1, "maximum": 3}, 4, 3),
    ],
)
def test_fewer_values_than_items_are_an_error(items: dict[str, Any], minimum: int, most: int) -> None:
    with pytest.raises(GrammarError, match=f"uniqueItems leaves {most} at most") as raised:
        compiled({**UNIQUE, "items": items, "minItems": minimum})
    assert raised.value.pointer == "/minItems"
    compiled({**UNIQUE, "items": items, "minItems": most})


def test_an_alternative_with_fewer_values_than_items_is_left_out() -> None:
    schema = {"anyOf": [{**UNIQUE, "items": {"type": "null"}, "minItems": 2}, STRING]}
    assert admits(schema, "a") and not admits(schema, [None])


def test_unique_items_of_one_alternative_hold_for_arrays_of_all() -> None:
    schema = {"anyOf": [{**UNIQUE, "items": STRING}, {"type": "array", "items": {"type": "integer"}}]}
    assert admits(schema, ["a", "b"]) and admits(schema, [1, 2])
    assert not admits(schema, ["a", "a"]) and not admits(schema, [1, 1])


@pytest.mark.parametrize(
    ("value", "first", "second"),
    [
        ({"type": "string", "pattern": "^a+$"}, "a", "aa"),
        ({**UNIQUE, "items": {"type": "string", "pattern": "^a+$"}}, ["a"], ["a", "aa"]),
        ({"type": "array", "items": {"type": "number"}}, [1.0], [1.5]),
    ],
)
def test_closed_objects_differ_by_a_member_with_values_without_end(value: Any, first: Any, second: Any) -> None:
    item = {"type": "object", "properties": {"v": value, "n": {"type": "number"}}, "additionalProperties": False}
    schema = {**UNIQUE, "items": item}
    assert admits(schema, [{"v": first}, {"v": second, "n": 1}]) and not admits(schema, [{"v": first}, {"v": first}])


def test_closed_objects_without_such_a_member_are_compared_in_one_spelling() -> None:
    schema = {**UNIQUE, "items": NUMBERS}
    assert admits(schema, [{"a": 1}, {"a": 1.5}, {}]) and not admits(schema, [{"a": 1}, {"a": 1}])
    assert not allows(compiled(schema), b'[{"a":1.0}') and not allows(compiled(schema), b'[{"a":1e0}')


def test_items_that_an_alternative_excludes_are_written_in_one_spelling() -> None:
    numbers = {"type": "array", "items": {"type": "number"}}
    schema = {
        "oneOf": [
            {"properties": {"k": {**UNIQUE, "items": {"type": ["number", "null"]}}}, "required": ["k"]},
            {"properties": {"k": numbers, "x": {"const": 1}}, "required": ["x", "k"]},
        ]
    }
    grammar = compiled(schema, strict=False)
    assert allows(grammar, b'{"k":[1,null]}') and not allows(grammar, b'{"k":[1.0,null,1]}')


def test_items_that_must_lack_a_name_are_objects() -> None:
    schema = {**UNIQUE, "items": {"not": {"required": ["c"]}}, "minItems": 1}
    assert admits(schema, [{}, {"d": 1}])
    assert not admits(schema, ["x"]) and not admits(schema, [{"c": 1}])


def test_open_objects_that_must_lack_a_name_differ_by_another_member() -> None:
    item = {"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}]}
    schema = {**UNIQUE, "items": item}
    assert admits(schema, [{"a": 1}, {"b": 1}, {"a": 1, "c": 1}], strict=False)
    assert not admits(schema, [{"a": 1}, {"b": 1}, {"a": 1.0}], strict=False)


def test_an_array_of_one_item_has_unique_items() -> None:
    assert admits({**UNIQUE, "items": NUMBERS, "maxItems": 1}, [{"a": 1}])
    assert admits({**UNIQUE, "prefixItems": [NUMBERS], "items": False}, [{"a": 1}])


def test_what_lacks_unique_items_lacks_them_for_another_reason() -> None:
    schema = {"not": {**UNIQUE, "items": STRING}}
    assert admits(schema, [1, 1]) and not admits(schema, ["a", "a"]) and not admits(schema, ["a"])


def test_most_schemas_show_in_their_text_that_nothing_must_differ() -> None:
    assert not may_have_unique_parts(JsonSchema({"minProperties": 1, "uniqueItems": False}))
    assert may_have_unique_parts(JsonSchema({"items": {"uniqueItems": True}}))
    assert may_have_unique_parts(JsonSchema({"minProperties": 12}))


def test_equal_values_have_one_canonical_text() -> None:
    assert canonical('{"a":1.0,"b":[true]}') == canonical('{"b":[true],"a":1}')
    assert canonical("[1]") != canonical("[true]")
    assert canonical('{"a":1,"b":2}', ("a",)) == canonical('{"a":1,"b":3}', ("a",))
