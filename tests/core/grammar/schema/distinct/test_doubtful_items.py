"""Which schemas may ask for items, or names, that differ more than their language shows."""

from __future__ import annotations

from typing import Any

import pytest

from graftlm.core.grammar.schema.distinct.doubtful_items import no_text_found
from graftlm.core.grammar.schema.lowering import distinct_items
from graftlm.core.grammar.spec import JsonSchema, Options

DIGITS: dict[str, Any] = {"enum": [0, 1, 2]}
UNIQUE: dict[str, Any] = {"type": "array", "uniqueItems": True}
FLAGS: dict[str, Any] = {**UNIQUE, "items": {"type": "boolean"}}
CLOSED: dict[str, Any] = {"type": "object", "additionalProperties": False}
FLAGGED: dict[str, Any] = {**CLOSED, "properties": {"a": {"type": "boolean"}, "b": {"type": "boolean"}}}
SURE: list[dict[str, Any]] = [
    {**UNIQUE, "items": {"type": "string"}},
    {**UNIQUE, "items": DIGITS, "minItems": 2},
    {"type": "object", "properties": {"a": {**UNIQUE, "items": {"type": "integer"}}}},
    {**UNIQUE, "items": DIGITS, "contains": {"const": 1}},
    {**UNIQUE, "items": {"type": "string"}, "allOf": [{"contains": {"const": "a"}}, {"contains": {"const": "b"}}]},
    {**UNIQUE, "items": {"allOf": [{"type": ["string", "object"]}, {"anyOf": [{"const": "a"}, {"type": "object"}]}]}},
    {**UNIQUE, "items": FLAGGED, "minItems": 4},
]
LOOKED_AT: list[dict[str, Any]] = [
    {**UNIQUE, "items": DIGITS, "contains": {"const": 1}, "maxContains": 1},
    {**UNIQUE, "prefixItems": [DIGITS], "items": DIGITS},
    {**UNIQUE, "anyOf": [{"items": DIGITS}, {"items": {"enum": ["a"]}}]},
    {"properties": {"a": {**UNIQUE, "items": DIGITS, "contains": {"const": 1}, "maxContains": 1}}},
    {"oneOf": [{**UNIQUE, "items": {"type": "integer"}, "minItems": 1}, {**UNIQUE, "minItems": 2, "maxItems": 2}]},
    {**UNIQUE, "items": FLAGS},
    {**CLOSED, "properties": {"v": {**UNIQUE, "items": {**CLOSED, "properties": {"n": {"multipleOf": 0.5}}}}}},
]
HOLLOW: list[dict[str, Any]] = [
    {**UNIQUE, "prefixItems": [DIGITS], "items": DIGITS, "minItems": 2},
    {**UNIQUE, "items": FLAGS, "minItems": 4},
    {**UNIQUE, "items": FLAGGED, "minItems": 10},
    {**UNIQUE, "items": DIGITS, "contains": {"const": 1}, "not": {"maxItems": 2}},
    {"anyOf": [{"type": "array", "items": {"type": "null"}, "minItems": 2}, FLAGS]},
    {"allOf": [{"properties": {"v": FLAGS}}, {"additionalProperties": {"type": "array", "minItems": 3}}]},
    {**UNIQUE, "contains": DIGITS, "minContains": 2},
    {"anyOf": [{"const": [1, 1]}, {**UNIQUE, "items": {"type": "integer"}}]},
]


def marks(schema: dict[str, Any]) -> tuple[bool, bool]:
    items = distinct_items(JsonSchema(schema), Options())
    return items.may_lack_values, items.may_lack_endings


@pytest.mark.parametrize("schema", SURE)
def test_the_language_of_an_item_tells_how_many_there_are(schema: dict[str, Any]) -> None:
    assert marks(schema) == (False, False)


@pytest.mark.parametrize("schema", LOOKED_AT)
def test_what_it_does_not_tell_is_looked_at_inside_of_the_array(schema: dict[str, Any]) -> None:
    assert marks(schema) == (False, True)


@pytest.mark.parametrize("schema", HOLLOW)
def test_an_array_that_may_have_no_value_is_looked_for_everywhere(schema: dict[str, Any]) -> None:
    assert marks(schema) == (True, True)


def test_each_definition_is_asked_about_once_however_many_ways_lead_to_it() -> None:
    names = "abcdefghij"
    one = {"properties": {name: {"anyOf": [{"$ref": "#/$defs/one"}, {"$ref": "#/$defs/two"}]} for name in names}}
    two = {"properties": {name: {"$ref": "#/$defs/one"} for name in names}}
    kinds = {"one": {"type": "object", **one}, "two": {"type": "object", **two}}
    schema = {"type": "array", "uniqueItems": True, "items": {"$ref": "#/$defs/one"}, "$defs": kinds}
    assert marks(schema) == (False, True)  # 10 ** 6 ways of 12 steps


def test_definitions_that_are_parts_of_themselves_are_followed_once() -> None:
    itself = {"anyOf": [{"$ref": "#/$defs/b"}, {"$ref": "#/$defs/a"}, {"type": "integer"}]}
    part = {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "minimum": 0}
    schema = {"properties": {"x": {"type": "string"}, "y": {"$ref": "#/$defs/a"}}, "$defs": {"a": itself, "b": part}}
    assert marks(schema) == (False, False)


def test_the_first_keyword_that_asks_is_named() -> None:
    issue = no_text_found(JsonSchema({"properties": {"a/b": {"uniqueItems": True, "items": DIGITS}}}))
    assert issue.pointer == "/properties/a~1b/uniqueItems"
