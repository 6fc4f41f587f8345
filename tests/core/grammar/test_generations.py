"""Texts written at random under every keyword and random budgets, each judged by jsonschema.

GENERATED_TEXTS=n writes n texts of each schema.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from bench.grammar.generations import judge

NUM_TEXTS = int(os.environ.get("GENERATED_TEXTS", "4"))
INTEGER = {"type": "integer"}
SMALL = {"type": "integer", "minimum": 0, "maximum": 30}
AB = {"a": {"type": "boolean"}, "b": INTEGER}

SCHEMAS: dict[str, Any] = {
    "not": {"type": "string", "not": {"enum": ["", "a"]}, "maxLength": 4},
    "not object": {"type": "object", "properties": AB, "not": {"required": ["a", "b"]}},
    "oneOf overlapping": {"oneOf": [{"type": "integer", "multipleOf": 2}, {"type": "integer", "multipleOf": 3}]},
    "oneOf objects": {"oneOf": [{"required": ["a"]}, {"required": ["b"]}], "type": "object", "properties": AB},
    "if": {
        "properties": AB,
        "type": "object",
        "if": {"properties": {"a": {"const": True}}},
        "then": {"required": ["b"]},
    },
    "contains": {"type": "array", "items": SMALL, "contains": {"const": 7}, "minContains": 2, "maxContains": 3},
    "contains any": {"type": "array", "contains": INTEGER},
    "dependentRequired": {"type": "object", "properties": AB, "dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {
        "type": "object",
        "properties": AB,
        "dependentSchemas": {"a": {"properties": {"b": {"minimum": 5}}}},
    },
    "unevaluatedProperties": {"allOf": [{"properties": AB}], "type": "object", "unevaluatedProperties": False},
    "unevaluatedItems": {"type": "array", "prefixItems": [INTEGER], "unevaluatedItems": {"type": "null"}},
    "patternProperties": {
        "type": "object",
        "patternProperties": {"^a": INTEGER, "b$": {"minimum": 3}},
        "additionalProperties": False,
    },
    "propertyNames": {"type": "object", "propertyNames": {"pattern": "^[a-c]{1,3}$"}, "additionalProperties": INTEGER},
    "minProperties": {"type": "object", "properties": AB, "minProperties": 1, "additionalProperties": False},
    "lookahead": {"type": "string", "pattern": "^(?!x)(?=.*b)[a-x]{1,5}$"},
    "uniqueItems": {"type": "array", "items": SMALL, "uniqueItems": True, "minItems": 3},
    "uniqueItems any": {"type": "array", "uniqueItems": True, "minItems": 2},
    "uniqueItems nested": {"type": "array", "items": {"type": "array"}, "uniqueItems": True},
    "uniqueItems numbers": {"type": "array", "items": {"type": "number", "maximum": 2}, "uniqueItems": True},
    "free number": {"type": "number"},
    "bounded numbers": {"type": "array", "items": {"type": "number", "exclusiveMinimum": 0.5}},
    "steps": {"type": "number", "multipleOf": 0.25},
    "recursion": {"$ref": "#/$defs/t", "$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}},
    "length of a pattern": {"type": "string", "pattern": "^(ab|c)+$", "minLength": 3, "maxLength": 7},
    **{
        f"format {name}": {"type": "string", "format": name}
        for name in ("uri-template", "iri", "regex", "idn-email", "uri")
    },
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_text_is_valid(name: str) -> None:
    judged, _, failures = judge(name, SCHEMAS[name], NUM_TEXTS, np.random.default_rng(0))
    assert failures == []
    assert judged == NUM_TEXTS
