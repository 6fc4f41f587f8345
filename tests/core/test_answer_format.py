"""The words of `response_format` and the schema that each asks for."""

from __future__ import annotations

from typing import Any

import pytest

from graftlm.core.answer_format import schema_of_format
from graftlm.core.errors import ConfigError

LIST = {"type": "array"}


@pytest.mark.parametrize(
    ("given", "schema"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_object", "schema": LIST}, LIST),
        ({"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": LIST}}, LIST),
        ({"type": "json_schema", "json_schema": {"schema": LIST}, "strict": True}, LIST),
        ({"type": "json_schema", "name": "a", "description": "d", "schema": LIST}, LIST),
        ({"type": "json_schema", "schema": False}, False),
    ],
)
def test_each_form_says_its_schema(given: dict[str, Any], schema: Any) -> None:
    assert schema_of_format(given) == schema


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"type": "json_schema", "schem": LIST}, r"response_format\.schem is unknown; did you mean 'schema'\?"),
        (
            {"type": "json_schema", "json_schema": {"shema": LIST}},
            r"json_schema\.shema is unknown; did you mean 'schema'",
        ),
        ({"type": "json_schema", "json_schema": {"schema": LIST, "x": 1}}, r"json_schema\.x is unknown; known: schema"),
        ({"type": "text", "schema": LIST}, r"response_format\.schema is unknown; known: type"),
    ],
)
def test_an_unknown_field_is_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        schema_of_format(given)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"type": "xml"},
        {"type": ["text"]},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "a"}},
        {"type": "json_schema", "json_schema": "a"},
        {"type": "json_schema", "schema": LIST, "json_schema": {"schema": LIST}},
    ],
)
def test_what_says_no_schema_or_two_is_shown_the_forms(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="give .*'json_object'.*'schema'"):
        schema_of_format(given)
