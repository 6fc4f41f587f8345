"""Schemas whose rules take too many places are told before they are lowered."""

from __future__ import annotations

from typing import Any

import pytest

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.automata.stack.call_plan import plan_calls
from graftlm.core.grammar.compile import language_of
from graftlm.core.grammar.schema.called_places import takes_many_called_places
from graftlm.core.grammar.schema.reading.json_schema import SchemaReader
from graftlm.core.grammar.spec import JsonSchema, Limits, Options


def takes_many(schema: dict[str, Any], states: int) -> bool:
    spec, options = JsonSchema(schema), Options(limits=Limits(states=states))
    return takes_many_called_places(SchemaReader(spec, options), spec, options)


def is_refused(schema: dict[str, Any], states: int) -> bool:
    language = language_of(JsonSchema(schema), Options())
    try:
        plan_calls(language.node, language.rules, Limits(states=states))
    except GrammarError:
        return True
    return False


def members(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"name{i:03}": {"type": "null"} for i in range(count)}}


ANYTHING: dict[str, Any] = {}
MANY = members(400)["properties"]
SCHEMAS: dict[str, dict[str, Any]] = {
    "of one rule": {"type": "object", "properties": {**MANY, "any": ANYTHING}},
    "that is called": {
        "$defs": {"part": {"type": "object", "properties": {**MANY, "any": ANYTHING}}},
        "type": "object",
        "properties": {name: {"$ref": "#/$defs/part"} for name in "abcdefgh"},
    },
    "that contains itself": {"type": "object", "properties": {**MANY, "more": {"$ref": "#"}}},
    "of counted items": {
        "type": "object",
        "properties": {"any": ANYTHING, "list": {"type": "array", "items": {"enum": ["x" * 30]}, "maxItems": 200}},
    },
    "of long texts": {"type": "object", "properties": {"any": ANYTHING, "text": {"type": "string", "maxLength": 200}}},
    "of either": {
        "type": "object",
        "properties": {**MANY, "any": ANYTHING},
        "anyOf": [{"required": ["name000"]}, {"required": ["name001"]}],
    },
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_places_are_about_those_that_are_planned(name: str) -> None:
    schema = SCHEMAS[name] | {"$comment": "-" * 30_000}  # only of long schemas they are counted
    counted = next(states for states in range(2_000, 30_000, 200) if not takes_many(schema, states))
    assert is_refused(schema, int(counted * 0.9)) and not is_refused(schema, int(counted * 1.3))


def test_a_schema_without_rules_is_left_to_a_plain_automaton() -> None:
    assert takes_many({**members(400), "$comment": "-" * 4_000, "additionalProperties": True}, states=4_000)
    assert not takes_many({**members(400), "$comment": "-" * 4_000}, states=4_000)
