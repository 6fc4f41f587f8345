"""Objects under conditions on which members there are."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from graftlm.core.grammar.schema.algebra.shapes import Both, Reference
from graftlm.core.grammar.schema.lowering import Lowering
from graftlm.core.grammar.schema.reading.json_schema import SchemaReader
from graftlm.core.grammar.schema.text.conditions import to_walk
from graftlm.core.grammar.spec import JsonSchema, Options
from tests.grammars import allows, compact, compiled

NAMES = ("a", "b", "c", "d")
PROPERTIES: dict[str, Any] = {
    "a": {"enum": ["x", "y"]},
    "b": {"type": "integer"},
    "c": {"type": "integer"},
    "d": {"$ref": "#/$defs/d"},
}
BASE: dict[str, Any] = {"$defs": {"d": {"type": "integer"}}, "type": "object", "properties": PROPERTIES}


def needs(*names: str) -> dict[str, Any]:
    return {"required": list(names)}


A_IS_X = {"properties": {"a": {"const": "x"}}, **needs("a")}
CONDITIONS: dict[str, dict[str, Any]] = {
    "one of three": {"oneOf": [needs("a"), needs("b"), needs("c")]},
    "two choices": {"allOf": [{"oneOf": [needs("a"), needs("b")]}, {"anyOf": [needs("c"), needs("d")]}]},
    "dependencies": {"dependentRequired": {"a": ["b"], "b": ["a", "c"], "d": ["c"]}},
    "constants": {
        "allOf": [{"if": A_IS_X, "then": needs("b"), "else": needs("c")}, {"if": needs("d"), "then": A_IS_X}]
    },
    "none": {"anyOf": [needs("a"), needs("b"), {"properties": {"c": False}}]},
}


def num_walks(schema: dict[str, Any], *, strict: bool = True) -> tuple[int, int]:
    """How many walks there are for the object at the root of a schema, and how many cases it has."""
    spec, options = JsonSchema(schema), Options(strict=strict)
    lowering = Lowering(spec, options, SchemaReader(spec, options))
    narrowed = lowering.algebra.narrow(Reference(""), "object")
    assert isinstance(narrowed, Both)
    return len(to_walk(lowering, narrowed)), len(lowering.algebra.cases.of(narrowed) or [])


@pytest.mark.parametrize("conditions", CONDITIONS.values(), ids=CONDITIONS.keys())
@pytest.mark.parametrize("closing", [{}, {"additionalProperties": False}], ids=["open", "closed"])
def test_one_walk_allows_what_the_schema_does(conditions: dict[str, Any], closing: dict[str, Any]) -> None:
    schema = {**BASE, **conditions, **closing}
    walks, cases = num_walks(schema)
    assert walks == 1 and cases > 2
    validator = Draft202012Validator(schema)
    for engine in (None, "llguidance"):
        grammar = compiled(JsonSchema(schema), engine=engine)
        for names in (names for size in range(5) for names in combinations(NAMES, size)):
            for a in ("x", "y"):
                value = {name: a if name == "a" else 1 for name in names}
                assert allows(grammar, compact(value)) == validator.is_valid(value), (engine, value)
            assert not allows(grammar, compact({**{name: "x" if name == "a" else 1 for name in names}, "e": 1}))


def test_strict_mode_allows_others_only_where_a_case_declares_them() -> None:
    apart = [{**needs(name), "properties": {name.upper(): {}}} for name in "abc"]
    schema = {**BASE, "oneOf": apart}
    walks, cases = num_walks(schema)
    assert walks == cases > 2
    grammar = compiled(JsonSchema(schema))
    assert allows(grammar, '{"b":1,"B":1}') and not allows(grammar, '{"b":1,"A":1}')


def test_members_keep_the_order_of_their_own_case() -> None:
    """A case without the second condition has no `c` before `b`."""
    conditions = {"anyOf": [{"properties": {"c": False}, **needs("a")}, needs("b"), needs("d")]}
    schema = {"allOf": [conditions, {"properties": PROPERTIES, "$defs": BASE["$defs"], "additionalProperties": False}]}
    schema = {**schema, "$defs": BASE["$defs"], "type": "object"}
    walks, cases = num_walks(schema)
    assert walks == cases > 2
    grammar = compiled(JsonSchema(schema))
    assert allows(grammar, '{"b":1,"c":1}') and not allows(grammar, '{"a":"x","c":1}')


def test_more_states_than_the_cases_have_are_walked_case_by_case() -> None:
    """Which of the first names were there decides which of the last ones may lack: twice as many states for each."""
    names = [f"n{i}" for i in range(16)]
    pairs = [needs(names[i], names[i + 8]) for i in range(8)]
    schema = {"type": "object", "properties": {name: {"type": "null"} for name in names}, "anyOf": pairs}
    walks, cases = num_walks(schema)
    assert walks == cases == 8
    grammar = compiled(JsonSchema(schema))
    assert allows(grammar, '{"n0":null,"n1":null,"n9":null}') and not allows(grammar, '{"n0":null,"n9":null}')
