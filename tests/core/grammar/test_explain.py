"""What is said about a constraint: engines, forced share, annotations, refusals and the nearest schema."""

from __future__ import annotations

from typing import Any

import pytest

from graftlm.core.errors import ConfigError
from graftlm.core.grammar.compile import Grammar
from graftlm.core.grammar.explain import explain
from graftlm.core.grammar.spec import Choices, JsonSchema, Regex
from tests.grammars import compiled

OBJECT: dict[str, Any] = {"type": "object"}


def test_a_regular_schema_is_native_as_a_whole() -> None:
    schema = {**OBJECT, "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "example": 3}
    found = explain(JsonSchema(schema))
    assert (found.engine, found.native, found.lazy) == ("fsm", ("", "/properties/ok"), ())
    assert found.forced_share > 0.9  # all but one byte of {"ok":true}
    assert [issue.keyword for issue in found.annotations] == ["example"]


def test_the_innermost_part_that_is_not_regular_is_named() -> None:
    schema = {**OBJECT, "properties": {"id": {"type": "integer"}, "data": {"type": "array"}}}
    found = explain(JsonSchema(schema))
    assert (found.engine, found.lazy) == ("pda", ("/properties/data",))
    assert found.native == ("/properties/id",)


@pytest.mark.parametrize(
    ("schema", "nearest"),
    [
        ({"type": "integer", "minimun": 3}, {"minimum": 3, "type": "integer"}),
        ({"items": {"type": "integer", "multipleOf": 99991}}, {"items": {"type": "integer"}}),
        ({**OBJECT, "properties": {"a/b": {"pattern": r"(.)\1"}}}, {**OBJECT, "properties": {"a/b": {}}}),
        ({"type": "integer", "minimum": 5, "maximum": 3}, None),
        ({"$ref": "#/$defs/missing"}, None),
        (
            {**OBJECT, "properties": {"a": {"$ref": "b.json"}, "b": {"items": {"$ref": "#/c"}, "multipleOf": 99991}}},
            {**OBJECT, "properties": {"a": {}, "b": {"items": {}}}},
        ),
    ],
)
def test_a_refusal_comes_with_the_nearest_schema_that_would_be_taken(schema: Any, nearest: Any) -> None:
    found = explain(JsonSchema(schema))
    assert found.engine is None and found.refused
    assert found.nearest == nearest
    if nearest is not None:
        assert explain(JsonSchema(nearest)).engine is not None


def test_a_grammar_explains_itself() -> None:
    found = compiled({"enum": ["red", "green"]}).explain()
    assert str(found).startswith("kept by fsm")
    with pytest.raises(ConfigError, match="made by hand"):
        Grammar("fsm", compiled({"type": "null"}).compiled).explain()


def test_other_constraints_are_explained_too() -> None:
    assert explain(Choices(["a", "b"])).engine == "fsm"
    assert explain(Regex(r"(a*)\1")).refused[0].message
