"""Arrays that count: what `contains` asks for is told apart as long as it matters, and no longer."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import jsonschema

from graftlm import Grammar, JsonSchema
from graftlm.core.grammar.compile import language_of
from graftlm.core.grammar.nodes import nodes
from graftlm.core.grammar.spec import Options
from tests.core.grammar.vocabularies import byte_vocabulary


def contains(text: str) -> dict[str, Any]:
    return {"contains": {"const": text}}


def either(*texts: str) -> dict[str, Any]:
    return {"anyOf": [contains(text) for text in texts]}


def accepted(schema: Any, values: list[Any]) -> list[bool]:
    grammar = Grammar.compile(JsonSchema(schema), byte_vocabulary(), strict=False)
    found = []
    for value in values:
        matcher, data = grammar.matcher(), json.dumps(value, separators=(",", ":")).encode()
        found.append(matcher.advance(list(data)) == len(data) and matcher.accepting)
    return found


def test_alternatives_of_contains_say_what_jsonschema_says() -> None:
    strings = {"type": "array", "items": {"type": "string"}, "maxItems": 3}
    values = [list(items) for length in range(4) for items in product(["a", "b", "c", "d"], repeat=length)]
    for asked in (
        [either("a", "b"), either("c", "d")],
        [either("a", "b"), {"not": either("c", "d")}],
        [{"oneOf": [contains("a"), {"contains": {"enum": ["b", "c"]}, "minContains": 2}]}],
        [{"if": either("a", "b"), "then": {"minItems": 3}, "else": contains("d")}],
        [{**contains("a"), "minItems": 2}, {"contains": {"const": "b"}, "maxContains": 1}],
    ):
        schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **strings, "allOf": asked}
        validator = jsonschema.Draft202012Validator(schema)
        assert accepted(schema, values) == [validator.is_valid(value) for value in values]


def test_bounds_and_items_with_a_place_of_their_own_count_beside_contains() -> None:
    values = [list(items) for length in range(5) for items in product(["a", "b", "c"], repeat=length)]
    pair = {"prefixItems": [{"const": "a"}, {"enum": ["a", "b"]}], "items": {"enum": ["b", "c"]}}
    for alternatives in (
        [{**pair, **contains("c")}, {**either("b", "c"), "maxItems": 1}, {"maxItems": 3, **contains("c")}],
        [{**pair, "maxItems": 3}, {"contains": {"const": "a"}, "minContains": 2, "maxContains": 3, "maxItems": 4}],
        [{"not": pair}, {**contains("b"), "minItems": 2, "maxItems": 2}, {**contains("c"), "maxItems": 1}],
    ):
        for word in ("anyOf", "oneOf"):
            dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
            strings = {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 4}
            schema = {**dialect, **strings, word: alternatives}
            validator = jsonschema.Draft202012Validator(schema)
            assert accepted(schema, values) == [validator.is_valid(value) for value in values]


def test_an_alternative_that_one_item_has_settled_takes_no_more_places() -> None:
    pairs = [either(f"{letter}1", f"{letter}2") for letter in "abcd"]
    schema = {"type": "array", "items": {"type": "string"}, "allOf": pairs}
    rules = language_of(JsonSchema(schema), Options()).rules.values()
    (walk,) = [item for rule in rules for item in nodes.children(rule) if isinstance(item, nodes.Graph)]
    assert len(walk.rows) == 2**4 + 1  # any of 4 alternatives may hold so far, not any of 8 constants
