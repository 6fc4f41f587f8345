"""Schemas whose shape shows at a glance."""

from __future__ import annotations

from typing import Any

import pytest

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.schema.algebra.shapes import Number, Object, Reference, Text
from graftlm.core.grammar.schema.reading.json_schema import SchemaReader
from graftlm.core.grammar.schema.reading.plain_schemas import plain_shape
from graftlm.core.grammar.schema.reading.references import References
from graftlm.core.grammar.spec import JsonSchema, Limits, Options

DOCUMENT = {"$defs": {"a": {"type": "string"}}}


def references(document: Any = DOCUMENT, **documents: Any) -> References:
    found = References(document, documents)
    found.target("#/$defs/a", "/properties/a/$ref")
    return found


def test_a_scalar_type_and_a_reference_that_was_met_show_at_a_glance() -> None:
    assert plain_shape({"type": "string", "description": "a name"}, references()) is Text()
    assert plain_shape({"type": "integer", "default": 1}, references()) is Number(integer=True)
    assert plain_shape({"$ref": "#/$defs/a", "title": "A"}, references()) is Reference("/$defs/a")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "minLength": 1},
        {"type": ["string", "null"]},
        {"type": "array"},
        {"type": "text"},
        {"type": "string", "nullable": True},
        {"type": "string", "titel": "x"},
        {"type": "string", "$ref": "#/$defs/a"},
        {"$ref": "#/$defs/b"},
        {"$ref": "#/$defs/a", "minLength": 1},
        {"$ref": "#/$defs/a", "$id": "other"},
        {"$ref": 1},
        {},
    ],
)
def test_others_have_to_be_read(schema: dict[str, Any]) -> None:
    assert plain_shape(schema, references()) is None


def test_where_documents_lie_beside_a_schema_its_place_tells_what_a_reference_means() -> None:
    found = references(**{"https://a.test/other": DOCUMENT})
    assert plain_shape({"$ref": "#/$defs/a"}, found) is None
    reader = SchemaReader(
        JsonSchema({"$ref": "https://a.test/other"}, {"https://a.test/other": {"properties": {"b": {"$ref": "#"}}}}),
        Options(),
    )
    other = reader.shape(reader.references.target("https://a.test/other", "/$ref"))
    assert isinstance(other, Object) and other.property("b") is Reference("https://a.test/other#")


@pytest.mark.parametrize("inner", [{"type": "string"}, {"$ref": "#/$defs/a"}])
def test_what_shows_at_a_glance_counts_as_a_level(inner: dict[str, Any]) -> None:
    schema = {"properties": {"b": {"$ref": "#/$defs/a"}, "c": inner}, **DOCUMENT}
    SchemaReader(JsonSchema(schema), Options(limits=Limits(depth=2))).shape("")
    with pytest.raises(GrammarError, match="nests deeper than 1 levels"):
        SchemaReader(JsonSchema(schema), Options(limits=Limits(depth=1))).shape("")
