"""Constraints are checked where they are built, and equal when they mean the same text."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import pytest
from pydantic import BaseModel

from graftlm.core.errors import ConfigError, GrammarError
from graftlm.core.grammar.spec import Choices, JsonSchema, Lark, Limits, Options, Regex


class Person(BaseModel):
    name: str
    age: int


@dataclass
class Point:
    x: float
    y: float


def test_a_pickled_schema_is_the_same_with_its_documents() -> None:
    given = JsonSchema({"$ref": "https://example.org/é"}, documents={"https://example.org/é": {"enum": ["ü", 1.0]}})
    found: JsonSchema = pickle.loads(pickle.dumps(given))
    assert found == given and (found.schema, found.documents) == (given.schema, given.documents)


def test_a_schema_is_read_from_a_dict_its_text_and_a_pydantic_class() -> None:
    schema = Person.model_json_schema()
    assert JsonSchema(Person) == JsonSchema(schema) == JsonSchema(JsonSchema(schema).text)
    assert hash(JsonSchema(Person)) == hash(JsonSchema(schema))


@pytest.mark.parametrize("kind", [Point, list[int], tuple[int, str], Person | None])
def test_any_type_that_pydantic_knows_is_a_schema(kind: Any) -> None:
    assert isinstance(JsonSchema(kind).schema, dict)


def test_the_order_of_properties_tells_two_schemas_apart() -> None:
    ab = {"properties": {"a": True, "b": True}}
    ba = {"properties": {"b": True, "a": True}}
    assert JsonSchema(ab) != JsonSchema(ba)
    assert JsonSchema(ab).key != JsonSchema(ba).key


def test_changing_the_dict_afterwards_does_not_change_the_constraint() -> None:
    schema: dict[str, Any] = {"type": "integer"}
    spec = JsonSchema(schema)
    schema["type"] = "string"
    assert spec.schema == {"type": "integer"}


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (3, "no JSON schema"),
        ("{", "not JSON"),
        ("[1]", "an object or a boolean"),
        ({"minimum": float("nan")}, "not plain JSON"),
        ({"enum": [{1: 2}]}, "key 1 is not text"),
        ({"const": object()}, "not plain JSON"),
    ],
)
def test_what_is_no_schema_is_refused(schema: Any, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        JsonSchema(schema)


def test_a_schema_nested_too_deep_is_refused_and_not_a_recursion_error() -> None:
    schema: dict[str, Any] = {}
    for _ in range(2000):
        schema = {"not": schema}
    with pytest.raises(GrammarError, match="nests deeper"):
        JsonSchema(schema)
    with pytest.raises(GrammarError):
        JsonSchema("[" * 100_000)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "empty"),
        (["a", "a"], "'a' is given twice"),
        (["\ud800"], "lone surrogate"),
        ("yes", "pass a list"),
        ([1], "not int"),
    ],
)
def test_choices_must_be_different_texts(options: Any, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        Choices(options)


def test_a_compiled_pattern_is_not_a_pattern() -> None:
    pattern: Any = 3
    with pytest.raises(GrammarError, match="a regex is text"):
        Regex(pattern)


def test_an_empty_lark_grammar_is_refused() -> None:
    with pytest.raises(GrammarError, match="empty"):
        Lark("  \n")


def test_a_lark_grammar_that_utf_8_cannot_write_is_refused_with_its_line() -> None:
    with pytest.raises(GrammarError, match="line 2 .* lone surrogate"):
        Lark('start: word\nword: "\ud800"')


@pytest.mark.parametrize("options", [{"whitespace": "some"}, {"on_unsupported": "ignore"}])
def test_an_option_out_of_range_names_what_is_allowed(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="use '"):
        Options(**options)


def test_limits_are_above_zero() -> None:
    with pytest.raises(ConfigError, match="limits.states is 0"):
        Limits(states=0)
