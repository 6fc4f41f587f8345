"""Schemas that are too large without rules are told by their names and constants."""

from typing import Any

import pytest

from graftlm.core.grammar.schema.lowering import lower_schema
from graftlm.core.grammar.schema.places import is_too_large, takes_many_places
from graftlm.core.grammar.schema.reading.json_schema import SchemaReader
from graftlm.core.grammar.spec import JsonSchema, Limits, Options
from tests.grammars import allows, compact, compiled


def takes_many(schema: dict[str, Any], states: int) -> bool:
    spec, options = JsonSchema(schema), Options(limits=Limits(states=states))
    return takes_many_places(SchemaReader(spec, options), spec, options)


def part(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"name{i:02}": {"type": "null"} for i in range(count)}}


def test_a_definition_counts_in_each_place_where_it_is_used() -> None:
    uses = {name: {"$ref": "#/$defs/part"} for name in "abc"}
    schema = {"$defs": {"part": part(20)}, "type": "object", "properties": uses}
    assert takes_many(schema, states=3 * (5 + 20 * 10) - 1)
    assert not takes_many(schema, states=3 * (5 + 20 * 10))


def test_constants_share_the_places_of_what_they_begin_with() -> None:
    schema = {"enum": [f"{'x' * 50}{i}" for i in range(10)]}
    assert takes_many(schema, states=51 + 10 * 2 - 1)
    assert not takes_many(schema, states=51 + 10 * 2)


def test_a_definition_that_contains_itself_ends_the_count() -> None:
    tree = part(20)
    tree["properties"]["more"] = {"$ref": "#"}
    assert takes_many(tree, states=20 * 10 + 8 - 1)
    assert not takes_many(tree, states=20 * 10 + 8)


def test_a_long_schema_that_combines_others_has_rules_and_one_that_does_not_has_none() -> None:
    options = Options(limits=Limits(states=100))
    for member, note, has_rules in (
        ({"allOf": [{"type": "string"}, {"maxLength": 3}]}, "", False),
        ({"allOf": [{"type": "string"}, {"maxLength": 3}]}, "x" * 500, True),
        ({"type": "string", "maxLength": 3}, "x" * 500, False),
    ):
        spec = JsonSchema({"type": "object", "properties": {"a": member}, "description": note})
        assert bool(lower_schema(spec, options, token_rules=False).rules) == has_rules


WORDS = {
    "$defs": {"word": {"type": "string", "pattern": f"^{'x' * 400}$"}},
    "type": "object",
    "properties": {f"a{i}": {"$ref": "#/$defs/word"} for i in range(100)},
    "description": "x" * 1_000,
}
"""40,000 places where the definition is written out, in 4,000 characters."""


@pytest.mark.parametrize("states", [8_000, 24_000])
def test_a_schema_that_is_too_large_written_out_has_rules_and_an_automaton(states: int) -> None:
    grammar = compiled(WORDS, limits=Limits(states=states), strict=True)
    assert grammar.engine == "pda"
    assert allows(grammar, compact({"a7": "x" * 400, "a8": "x" * 400}))
    assert not allows(grammar, compact({"a7": "x" * 401}))


def test_rules_for_parsers_come_later_since_they_cost_the_automaton() -> None:
    spec, options = JsonSchema(WORDS), Options(limits=Limits(states=30_000))
    lowered = lower_schema(spec, options, token_rules=False)
    assert is_too_large(lowered, spec, options, token_rules=False)
    assert not is_too_large(lowered, spec, options, token_rules=True)
    assert not is_too_large(lowered, JsonSchema({}), options, token_rules=False)  # too short to be counted
