"""The fewest places of an automaton are told before it is built."""

from __future__ import annotations

import json
from typing import Any

import pytest

from graftlm.core.errors import GrammarError
from graftlm.core.grammar import ast
from graftlm.core.grammar.automata.nfa.builder import NfaBuilder
from graftlm.core.grammar.automata.nfa.least_places import _LeastPlaces, check_places
from graftlm.core.grammar.automata.products.product import without_products
from graftlm.core.grammar.regex import parser
from graftlm.core.grammar.schema.lowering import lower_schema
from graftlm.core.grammar.spec import JsonSchema, Limits, Options
from tests.grammars import compiled

SCHEMAS: list[dict[str, Any]] = [
    {"enum": ["north", "northern", "south", "so", 1, None]},
    {"type": "array", "items": {"enum": [True, False]}, "minItems": 3, "maxItems": 9},
    {"type": "object", "properties": {"a": {"type": "string", "maxLength": 40}, "b": {"pattern": "^[é-ü]+$"}}},
    {"type": "array", "prefixItems": [{"type": "number", "minimum": 3}, {"format": "date"}], "items": False},
    {"type": "object", "properties": {"a": {"const": 1}}, "additionalProperties": {"type": "boolean"}},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=json.dumps)
def test_an_automaton_has_no_fewer_places(schema: dict[str, Any]) -> None:
    node = lower_schema(JsonSchema(schema), Options(), token_rules=False).node
    least = _LeastPlaces().of(node)
    places = NfaBuilder(1 << 40).build(without_products(node)).num_states
    assert places / 3 < least <= places
    check_places(node, least)
    with pytest.raises(GrammarError, match=f"needs more than {least - 1:,} places"):
        check_places(node, least - 1)


@pytest.mark.parametrize(
    "pattern", ["(a|bc){2,4}", "(abc){90}", "(x{3,80}y?)*", "a+|b{0,3}", "[a-zé]{30}|", "((ab){5}c){7}"]
)
def test_repeats_take_their_places_whether_or_not_they_are_counted(pattern: str) -> None:
    node = parser.parse(pattern)
    for counters in (True, False):
        places = NfaBuilder(1 << 40, counters=counters).build(node).num_states
        assert _LeastPlaces(counters).of(node) <= places <= 3 * _LeastPlaces(counters).of(node)


def test_a_product_takes_no_places_for_sure() -> None:
    node = ast.Intersection((ast.star(ast.chars("ab")), ast.literal("ab" * 50)))
    assert _LeastPlaces().of(ast.concat(node, ast.literal("c"))) == 1


def test_a_long_schema_has_the_engine_of_a_short_one() -> None:
    names = [f"member number {i}" for i in range(100)]
    schema = {"type": "object", "properties": {name: {"type": "null"} for name in names}}
    for states, engine in ((20_000, "fsm"), (500, "llguidance")):
        for described in (schema, {**schema, "description": "x" * 10_000}):
            assert compiled(JsonSchema(described), limits=Limits(states=states)).engine == engine
