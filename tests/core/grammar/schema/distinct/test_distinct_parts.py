"""Schemas whose parts must differ although their own text does not say so."""

from __future__ import annotations

from typing import Any

import pytest

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
