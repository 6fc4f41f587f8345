"""The keywords of JSON Schema: which are kept, which say nothing about the value, which cannot be kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TYPES = ("null", "boolean", "number", "integer", "string", "array", "object")

OF_TYPE: dict[str, tuple[str, ...]] = {
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "string": ("minLength", "maxLength", "pattern", "format", "contentEncoding", "contentMediaType", "contentSchema"),
    "array": (
        *("items", "prefixItems", "additionalItems", "minItems", "maxItems"),
        *("uniqueItems", "contains", "minContains", "maxContains", "unevaluatedItems"),
    ),
    "object": (
        *("properties", "patternProperties", "additionalProperties", "required", "propertyNames"),
        *("minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies"),
        "unevaluatedProperties",
    ),
}
"""Keywords that speak of one type only."""

GENERAL = ("type", "enum", "const", "allOf", "anyOf", "oneOf", "not", "$ref", "nullable")

ANNOTATIONS = frozenset(
    {
        *("$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$comment", "$defs", "definitions", "$vocabulary"),
        *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly"),
        *("discriminator", "xml", "externalDocs"),
        *("then", "else"),  # without `if` they say nothing
    }
)

REFUSED: dict[str, str] = {
    "if": "write the cases as anyOf",
    "$dynamicRef": "use $ref",
    "$recursiveRef": "use $ref",
}
"""Keywords that no engine here can keep, and what to write instead."""

KNOWN = frozenset({*GENERAL, *ANNOTATIONS, *REFUSED, *(word for words in OF_TYPE.values() for word in words)})


def implied_types(schema: Mapping[str, Any], strict: bool) -> list[str]:
    """The types that a schema without `type` admits: all, but in strict mode the one that its keywords speak of."""
    spoken_of = [name for name, words in OF_TYPE.items() if any(word in schema for word in words)]
    if strict and len(spoken_of) == 1 and not {"enum", "const"} & set(schema):
        return spoken_of
    return ["null", "boolean", "number", "string", "array", "object"]
