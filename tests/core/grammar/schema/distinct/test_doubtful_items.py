"""Which schemas may ask for items, or names, that differ more than their language shows."""

from __future__ import annotations

from typing import Any

import pytest

from graftlm.core.grammar.schema.distinct.doubtful_items import no_text_found
from graftlm.core.grammar.schema.lowering import distinct_items
from graftlm.core.grammar.spec import JsonSchema, Options

DIGITS: dict[str, Any] = {"enum": [0, 1, 2]}
SURE: list[dict[str, Any]] = [
    {"type": "array", "uniqueItems": True, "items": {"type": "string"}},
    {"type": "array", "uniqueItems": True, "items": DIGITS, "minItems": 2},
    {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True, "items": {"type": "integer"}}}},
]
DOUBTFUL: list[dict[str, Any]] = [
    {"type": "array", "uniqueItems": True, "items": DIGITS, "contains": {"const": 1}},
    {"type": "array", "uniqueItems": True, "prefixItems": [DIGITS], "items": DIGITS},
    {"type": "array", "uniqueItems": True, "anyOf": [{"items": DIGITS}, {"items": {"enum": ["a"]}}]},
    {"properties": {"a": {"type": "array", "uniqueItems": True, "items": DIGITS, "contains": {"const": 1}}}},
]


@pytest.mark.parametrize("schema", SURE)
def test_the_language_of_an_item_tells_how_many_there_are(schema: dict[str, Any]) -> None:
    assert not distinct_items(JsonSchema(schema), Options()).is_doubtful


@pytest.mark.parametrize("schema", DOUBTFUL)
def test_what_it_does_not_tell_is_looked_at(schema: dict[str, Any]) -> None:
    assert distinct_items(JsonSchema(schema), Options()).is_doubtful


def test_each_definition_is_asked_about_once_however_many_ways_lead_to_it() -> None:
    names = "abcdefghij"
    one = {"properties": {name: {"anyOf": [{"$ref": "#/$defs/one"}, {"$ref": "#/$defs/two"}]} for name in names}}
    two = {"properties": {name: {"$ref": "#/$defs/one"} for name in names}}
    kinds = {"one": {"type": "object", **one}, "two": {"type": "object", **two}}
    schema = {"type": "array", "uniqueItems": True, "items": {"$ref": "#/$defs/one"}, "$defs": kinds}
    assert distinct_items(JsonSchema(schema), Options()).is_doubtful  # 10 ** 6 ways of 12 steps


def test_definitions_that_are_parts_of_themselves_are_followed_once() -> None:
    itself = {"anyOf": [{"$ref": "#/$defs/b"}, {"$ref": "#/$defs/a"}, {"type": "integer"}]}
    part = {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "minimum": 0}
    schema = {"properties": {"x": {"type": "string"}, "y": {"$ref": "#/$defs/a"}}, "$defs": {"a": itself, "b": part}}
    assert not distinct_items(JsonSchema(schema), Options()).is_doubtful


def test_the_first_keyword_that_asks_is_named() -> None:
    issue = no_text_found(JsonSchema({"properties": {"a/b": {"uniqueItems": True, "items": DIGITS}}}))
    assert issue.pointer == "/properties/a~1b/uniqueItems"
