"""Schemas whose parts must differ although their own text does not say so."""

from __future__ import annotations

from typing import Any

import pytest

from graftlm.core.grammar.schema.distinct.distinct_parts import has_distinct_parts
from graftlm.core.grammar.schema.member_names import may_count_names
from graftlm.core.grammar.spec import JsonSchema
from tests.grammars import admits


@pytest.mark.parametrize(
    "uri",
    [
        "https://json-schema.org/draft/2020-12/schema",
        "https://json-schema.org/draft/2020-12/meta/validation",
        "http://json-schema.org/draft-07/schema#",
        "http://json-schema.org/draft-04/schema#",
    ],
)
@pytest.mark.parametrize("inside", [False, True])
def test_a_schema_of_schemas_lets_no_name_be_required_twice(uri: str, inside: bool) -> None:
    schema = {"$ref": uri}
    if inside:
        schema = {"type": "array", "items": schema}

    def taken(value: dict[str, list[str]]) -> bool:
        return admits(schema, [value] if inside else value)

    assert taken({"required": ["a", "b"]}) and taken({"type": ["integer", "string"]})
    assert not taken({"required": ["a", "a"]}) and not taken({"type": ["integer", "string", "integer"]})


@pytest.mark.parametrize(
    ("schema", "counts"),
    [
        ({"minProperties": 2}, True),  # two names that it does not list
        ({"minProperties": 2, "properties": {"a": {}}}, False),  # one of them is listed
        ({"minProperties": 2, "required": ["a"]}, False),
        ({"minProperties": 2, "properties": {"a": {}}, "additionalProperties": False}, True),  # nothing has it
        ({"minProperties": 3, "required": ["a"]}, True),
        ({"anyOf": [{"type": "null"}, {"items": {"minProperties": 2}}]}, True),
        ({"properties": {"minProperties": {"minProperties": 1}}}, False),  # a member with that name
        ({"not": {"items": {"maxProperties": 1}}}, True),
        ({"maxProperties": 1, "not": {"type": "null"}}, False),
    ],
)
def test_a_schema_counts_names_where_it_asks_for_more_members_than_it_lists(schema: Any, counts: bool) -> None:
    assert may_count_names(JsonSchema(schema)) == counts
    assert may_count_names(JsonSchema({"$ref": "x:y"}, documents={"x:y": {"$defs": {"a": schema}}})) == counts


STANDARD = "https://json-schema.org/draft/2020-12/schema"


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"$schema": STANDARD}, False),
        ({"$schema": STANDARD, "description": f"as {STANDARD} says"}, False),
        ({"$schema": STANDARD, "items": {"$ref": STANDARD}}, True),
        ({"$schema": STANDARD, "$id": STANDARD}, True),
        ({"$ref": STANDARD}, True),
        ({"properties": {"$schema": {"const": STANDARD}}}, False),
    ],
)
def test_a_schema_that_only_names_its_draft_has_no_such_parts(schema: dict[str, Any], expected: bool) -> None:
    assert has_distinct_parts(JsonSchema(schema)) == expected


def test_a_document_that_refers_to_a_schema_of_schemas_has_such_parts() -> None:
    schema = {"$schema": STANDARD, "$ref": "https://a.test/other"}
    assert has_distinct_parts(JsonSchema(schema, {"https://a.test/other": {"$ref": STANDARD}}))
