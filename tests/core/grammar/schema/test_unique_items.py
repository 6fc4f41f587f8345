"""Which `uniqueItems` a mask keeps: any other is an error with a pointer, or goes by `on_unsupported`."""

from __future__ import annotations

from typing import Any

import pytest

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.schema.unique_items import canonical, may_have_unique_parts
from graftlm.core.grammar.spec import JsonSchema
from tests.grammars import admits, compiled

UNIQUE: dict[str, Any] = {"type": "array", "uniqueItems": True}
STRING = {"type": "string"}
NUMBERS = {"type": "object", "properties": {"a": {"type": "number"}}, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({**UNIQUE, "items": NUMBERS}, "/uniqueItems"),
        ({"properties": {"a~b": {**UNIQUE, "items": NUMBERS}}}, "/properties/a~0b/uniqueItems"),
        ({**UNIQUE, "prefixItems": [STRING, STRING]}, "/uniqueItems"),
        ({**UNIQUE, "items": STRING, "contains": {"const": "a"}}, "/uniqueItems"),
        (
            {"anyOf": [{**UNIQUE, "items": STRING}, {"type": "array", "items": {"type": "null"}}]},
            "/anyOf/0/uniqueItems",
        ),
        ({"items": {"const": [2.5]}, "type": "array", "uniqueItems": True}, "/uniqueItems"),
        (
            {
                "type": "object",
                "patternProperties": {"^[ab]$": STRING},
                "additionalProperties": False,
                "minProperties": 2,
            },
            "/minProperties",
        ),
    ],
)
def test_what_no_mask_keeps_is_refused_or_dropped_with_a_warning(schema: dict[str, Any], pointer: str) -> None:
    with pytest.raises(GrammarError, match="cannot be kept") as raised:
        compiled(schema, strict=False)
    assert raised.value.pointer == pointer
    assert [issue.pointer for issue in compiled(schema, strict=False, on_unsupported="warn").warnings] == [pointer]


@pytest.mark.parametrize(
    ("items", "minimum", "most"),
    [
        ({"enum": ["a", "b", "c"]}, 4, 3),
        ({"enum": [1, 1.0, 2]}, 3, 2),
        ({"type": "string", "pattern": "^[ab]{1,2}$"}, 7, 6),
        ({"type": "integer", "minimum": 1, "maximum": 3}, 4, 3),
    ],
)
def test_fewer_values_than_items_are_an_error(items: dict[str, Any], minimum: int, most: int) -> None:
    with pytest.raises(GrammarError, match=f"uniqueItems leaves {most} at most") as raised:
        compiled({**UNIQUE, "items": items, "minItems": minimum})
    assert raised.value.pointer == "/minItems"
    compiled({**UNIQUE, "items": items, "minItems": most})


def test_an_alternative_with_fewer_values_than_items_is_left_out() -> None:
    schema = {"anyOf": [{**UNIQUE, "items": {"type": "null"}, "minItems": 2}, STRING]}
    assert admits(schema, "a") and not admits(schema, [None])


def test_an_array_of_one_item_has_unique_items() -> None:
    assert admits({**UNIQUE, "items": NUMBERS, "maxItems": 1}, [{"a": 1}])
    assert admits({**UNIQUE, "prefixItems": [NUMBERS], "items": False}, [{"a": 1}])


def test_what_lacks_unique_items_lacks_them_for_another_reason() -> None:
    schema = {"not": {**UNIQUE, "items": STRING}}
    assert admits(schema, [1, 1]) and not admits(schema, ["a", "a"]) and not admits(schema, ["a"])


def test_most_schemas_show_in_their_text_that_nothing_must_differ() -> None:
    assert not may_have_unique_parts(JsonSchema({"minProperties": 1, "uniqueItems": False}))
    assert may_have_unique_parts(JsonSchema({"items": {"uniqueItems": True}}))
    assert may_have_unique_parts(JsonSchema({"minProperties": 12}))


def test_equal_values_have_one_canonical_text() -> None:
    assert canonical('{"a":1.0,"b":[true]}') == canonical('{"b":[true],"a":1}')
    assert canonical("[1]") != canonical("[true]")
    assert canonical('{"a":1,"b":2}', ("a",)) == canonical('{"a":1,"b":3}', ("a",))
