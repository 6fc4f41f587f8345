"""What a string holds: JSON inside it is kept, and what else is said of its content where that can be."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel, Json

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.spec import JsonSchema
from tests.grammars import admits, compact, compiled

JSON = {"type": "string", "contentMediaType": "application/json"}


class Point(BaseModel):
    x: int
    tags: list[str] = []


class Record(BaseModel):
    point: Json[Point]
    counts: Json[dict[str, int]]
    free: Json[Any]


def test_pydantics_json_is_that_of_its_model() -> None:
    def text(point: Any, counts: Any = None, free: Any = None) -> dict[str, str]:
        return {"point": compact(point), "counts": compact(counts or {}), "free": compact(free)}

    schema = Record.model_json_schema()
    for good in (text({"x": 1}), text({"x": 1, "tags": ['"\\\n', "é"]}, {"a": 2}, [{"b": [1]}])):
        Record.model_validate(good)
        assert admits(schema, good)
    for bad in (text({"x": "1"}), text({}), text({"x": 1}, {"a": None}), {**text({"x": 1}), "free": "{"}):
        assert not admits(schema, bad)


def test_json_of_which_nothing_is_said_nests_three_levels() -> None:
    for good in ("1", "null", '"a\\n"', "[]", '{"a":{"b":[1]}}'):
        json.loads(good)
        assert admits(JSON, good)
    for bad in ("", "a", "[1", "{'a':1}", "[[[[1]]]]"):
        assert not admits(JSON, bad)


def test_json_inside_json_inside_json_is_kept() -> None:
    schema = {**JSON, "contentSchema": {**JSON, "contentSchema": {"enum": ['a"']}}}
    assert admits(schema, json.dumps(json.dumps('a"')))
    assert not admits(schema, json.dumps('a"'))


def test_no_string_escapes_json_under_not() -> None:
    assert admits({"not": JSON}, 1)
    assert not admits({"not": JSON}, "a")


def test_a_length_beside_json_of_any_kind_leaves_a_note() -> None:
    grammar = compiled({**JSON, "maxLength": 512})
    assert [issue.keyword for issue in grammar.annotations] == ["contentMediaType"]
    warned = compiled({**JSON, "maxLength": 512}, on_unsupported="warn")
    assert [issue.keyword for issue in warned.warnings] == ["contentMediaType"]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "uniqueItems": True},
        {"$ref": "#"},
        {"type": "array", "items": {"$ref": "#/contentSchema"}},
    ],
)
def test_json_that_is_not_regular_is_refused(schema: Any) -> None:
    with pytest.raises(GrammarError, match="nest the value itself") as refused:
        compiled({**JSON, "contentSchema": schema})
    assert refused.value.pointer == "/contentMediaType"


def test_a_definition_that_a_string_holds_is_that_of_the_whole_schema() -> None:
    schema = {"$defs": {"age": {"type": "integer", "minimum": 3}}, **JSON, "contentSchema": {"$ref": "#/$defs/age"}}
    assert admits(schema, "3")
    assert not admits(schema, "2")
    documents = {"https://example.org/age.json": {"const": 7}}
    other = JsonSchema({**JSON, "contentSchema": {"$ref": "https://example.org/age.json"}}, documents=documents)
    assert compiled(other).matcher().forced_bytes() == b'"7"'


@pytest.mark.parametrize("name", ["base64", "Base64", "BASE64"])
def test_an_encoding_is_kept_in_any_case(name: str) -> None:
    schema = {"type": "string", "contentEncoding": name}
    assert admits(schema, "YQ==")
    assert not admits(schema, "Y")


def test_other_encodings_are_annotations_and_misspelled_ones_errors() -> None:
    grammar = compiled({"type": "string", "contentEncoding": "quoted-printable"})
    assert [issue.keyword for issue in grammar.annotations] == ["contentEncoding"]
    with pytest.raises(GrammarError, match="did you mean 'base64'"):
        compiled({"type": "string", "contentEncoding": "base-64"})


def test_encoded_json_is_refused_but_in_drafts_to_which_it_is_a_note() -> None:
    encoded = {**JSON, "contentEncoding": "base64"}
    with pytest.raises(GrammarError, match="encoded JSON"):
        compiled(encoded)
    latest = compiled({"$schema": "https://json-schema.org/draft/2020-12/schema", **encoded})
    assert [issue.keyword for issue in latest.annotations] == ["contentMediaType"]


def test_a_value_that_the_schema_gives_may_hold_json_with_blanks() -> None:
    schema = {**JSON, "contentSchema": {"type": "array", "items": {"type": "integer"}}}
    assert admits({**schema, "enum": ["[1, 2]", '["a"]', "["]}, "[1, 2]")
    with pytest.raises(GrammarError, match="nothing can satisfy this"):
        compiled({**schema, "enum": ['["a"]', "["]})


@pytest.mark.parametrize("given", [[2.5], {}, 7, None])
def test_a_format_that_is_no_text_restricts_no_integer(given: object) -> None:
    assert admits({"type": "integer", "format": given}, 2**70)
