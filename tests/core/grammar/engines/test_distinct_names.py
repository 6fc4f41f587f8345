"""`minProperties` over names that the schema does not list: no name comes twice, and there is always a way to go on."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import numpy as np
import pytest

from bench.grammar.validity import write
from graftlm.core.errors import GrammarError
from graftlm.core.grammar.schema.lowering import lower_schema
from graftlm.core.grammar.spec import JsonSchema, Options
from tests.grammars import BYTES, allows, compiled

INTEGERS: dict[str, Any] = {"type": "object", "additionalProperties": {"type": "integer"}}
ABC: dict[str, Any] = {"type": "object", "propertyNames": {"enum": ["a", "b", "c"]}, "additionalProperties": {}}

SCHEMAS = [
    {**INTEGERS, "minProperties": 2},
    {**INTEGERS, "minProperties": 20},
    {"type": "object", "minProperties": 3},
    {**ABC, "minProperties": 3},
    {**ABC, "properties": {"a": {"type": "integer"}}, "minProperties": 3},
    {**ABC, "minProperties": 2, "dependentSchemas": {"b": {"required": ["a"]}}},
    {
        "type": "object",
        "minProperties": 3,
        "patternProperties": {"^[ab]$": {}, "^c$": {}},
        "additionalProperties": False,
    },
    {"type": "object", "minProperties": 3, "propertyNames": {"pattern": "^[ab]{1,2}$"}, "additionalProperties": {}},
    {"anyOf": [{**INTEGERS, "minProperties": 3}, {"type": "object", "minProperties": 2}]},
    {"type": "array", "minItems": 2, "uniqueItems": True, "items": {**INTEGERS, "minProperties": 2}},
]


def test_a_name_counts_once() -> None:
    grammar = compiled({**INTEGERS, "minProperties": 2})
    texts = ('{"a":1,"b":1}', '{"a":1,"a":2}', '{"a":1}', '{"a":1,"b":1,"c":1}', '{"é":1,"e":1}')
    assert [allows(grammar, text) for text in texts] == [True, False, False, True, True]


def test_names_are_apart_in_each_object_of_its_own() -> None:
    grammar = compiled({"type": "array", "items": {**INTEGERS, "minProperties": 2}})
    assert allows(grammar, '[{"a":1,"b":1},{"a":1,"b":1}]') and not allows(grammar, '[{"a":1,"b":1},{"b":1,"b":1}]')


def test_an_object_goes_on_only_while_names_are_left() -> None:
    matcher = compiled({**ABC, "minProperties": 2}).matcher()
    matcher.advance(list(b'{"a":1,"c":2'))
    row = np.zeros(BYTES.num_words, np.int32)
    matcher.fill_mask(row)
    assert row.view(np.uint32)[ord(",") >> 5] >> (ord(",") & 31) & 1
    matcher.advance(list(b',"b":[]'))
    matcher.fill_mask(row)
    assert not row.view(np.uint32)[ord(",") >> 5] >> (ord(",") & 31) & 1


@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
@pytest.mark.parametrize("strict", [False, True])
def test_texts_of_any_budget_have_enough_members(schema: dict[str, Any], strict: bool) -> None:
    grammar, rng = compiled(schema, strict=strict), np.random.default_rng(0)
    least = grammar.matcher().min_tokens_to_accept()
    for _ in range(4):
        data, _ = write(grammar, BYTES, rng, least + int(rng.integers(0, 40)))
        jsonschema.validate(json.loads(data), schema)


def test_more_members_than_names_are_a_contradiction() -> None:
    with pytest.raises(GrammarError, match="nothing can satisfy"):
        compiled({**ABC, "minProperties": 4})


def test_names_that_nothing_keeps_apart_are_refused_with_their_place() -> None:
    spec = JsonSchema({"items": {**INTEGERS, "minProperties": 2}})
    with pytest.raises(GrammarError, match="in a larger grammar") as refused:
        lower_schema(spec, Options())
    assert refused.value.pointer == "/items/minProperties"


@pytest.mark.parametrize("names", [{"pattern": "b$"}, {"pattern": "^[0-9]{2}-[A-Z]$"}, {"format": "date"}])
def test_the_names_of_an_ending_differ_whatever_pattern_they_have(names: dict[str, Any]) -> None:
    matcher = compiled({**INTEGERS, "propertyNames": names, "minProperties": 3}).matcher()
    assert matcher.min_tokens_to_accept() > 0
    assert len(json.loads(bytes(matcher.ending([])))) == 3


MORE_THAN_2: dict[str, Any] = {"not": {"maxProperties": 2}}


@pytest.mark.parametrize(
    "schema",
    [
        MORE_THAN_2,
        {"$defs": {"more": MORE_THAN_2}, "$ref": "#/$defs/more"},
        {"type": "object", "properties": {name: {"type": "integer"} for name in "abcd"}, **MORE_THAN_2},
        {"type": "object", "not": {"anyOf": [{"type": "object", "maxProperties": 2}, {"type": "string"}]}},
        {"allOf": [{"type": "object", "propertyNames": {"enum": ["a", "b", "c"]}}, MORE_THAN_2]},
        {"type": "object", "$defs": {"few": {"title": "few", "maxProperties": 2}}, "not": {"$ref": "#/$defs/few"}},
    ],
)
def test_a_number_of_members_that_is_excluded_is_counted_by_names(schema: dict[str, Any]) -> None:
    """All but the third were refused, or left such objects out."""
    grammar = compiled(schema, strict=False)
    texts = ('{"a":1,"b":1,"c":1}', '{"a":1,"b":1}', '{"a":1,"b":1,"a":2}', "{}")
    assert [allows(grammar, text) for text in texts] == [True, False, False, False]
    for seed in range(10):
        text, _ = write(grammar, BYTES, np.random.default_rng(seed), grammar.matcher().min_tokens_to_accept() + 60)
        assert jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))


def test_more_members_than_several_schemas_leave_names_for_are_a_contradiction() -> None:
    with pytest.raises(GrammarError, match="nothing can satisfy this"):
        compiled({"allOf": [{"type": "object", "propertyNames": {"enum": ["a", "b"]}}, MORE_THAN_2]})


def test_names_of_an_object_that_strict_mode_closes_have_an_ending() -> None:
    """The names were taken for any: no ending was found, and a third of such texts were cut or stopped."""
    names: dict[str, Any] = {"patternProperties": {"^a": {"type": "null"}, "^[cd]$": {}}}
    grammar = compiled({"type": "object", **names, "minProperties": 2})
    assert allows(grammar, bytes(grammar.matcher().ending([])).decode())
    for seed in range(20):
        text, _ = write(grammar, BYTES, np.random.default_rng(seed), grammar.matcher().min_tokens_to_accept() + seed)
        assert len(json.loads(text)) >= 2
