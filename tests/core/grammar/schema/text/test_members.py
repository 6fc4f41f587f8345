"""Objects whose names have patterns: a row of members where nothing that is written decides about what follows."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from graftlm.core.grammar.compile import language_of
from graftlm.core.grammar.engines.lark_writer import to_lark
from graftlm.core.grammar.nodes import nodes
from graftlm.core.grammar.schema.text import declared
from graftlm.core.grammar.schema.text.members import Members
from graftlm.core.grammar.spec import JsonSchema, Options
from tests.core.grammar.engines.test_lark_writer import accepted

FIELDS = {
    "a": {"type": "integer"},
    "b": {"type": "array", "items": {"$ref": "#"}},
    "c": {"type": "boolean"},
    "d": False,
}
SCHEMAS: list[dict[str, Any]] = [
    {"patternProperties": {"^x": {"type": "null"}}, "additionalProperties": False},
    {"patternProperties": {"^x": {"type": "null"}, "y$": {"type": "boolean"}}},
    {"propertyNames": {"pattern": "^[a-y]+$"}, "additionalProperties": {"type": "integer"}},
    {"propertyNames": {"pattern": "^[abcx]$"}},
]
OTHERS = ["", '"xy":null', '"y":true', '"z":1', '"x":null,"y":true', '"x":null,"x":null', '"x":1']


def documents() -> list[str]:
    members = {"a": '"a":1', "b": '"b":[]', "c": '"c":true', "d": '"d":1'}
    rows = [",".join([members[name] for name in names]) for size in range(4) for names in combinations("abcd", size)]
    rows += ['"c":true,"a":1', '"a":true', '"b":[{"b":[],"x":null}]']
    return [f"{{{','.join(filter(None, (row, other)))}}}" for row in rows for other in OTHERS] + ['{"a":1,}', "{,}"]


@pytest.mark.parametrize("required", [[], ["b"], ["a", "c"], ["x"]])
@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_row_says_what_a_walk_says(
    schema: dict[str, Any], required: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = JsonSchema({"type": "object", "properties": FIELDS, "required": required, **schema})
    rows: list[nodes.Node] = []
    in_order = declared.in_order

    def seen(*args: Any) -> nodes.Node:
        rows.append(in_order(*args))
        return rows[-1]

    def text_of() -> str:
        language = language_of(spec, Options(strict=False), token_rules=True)
        return to_lark(language.node, language.rules)

    monkeypatch.setattr(declared, "in_order", seen)
    row = text_of()
    assert rows
    monkeypatch.setattr(Members, "_row", lambda self: None)
    walk = text_of()
    some = documents()
    found = [accepted(row, document) for document in some]
    assert found == [accepted(walk, document) for document in some]
    assert any(found) or required == ["x"]
    assert not all(found)


def test_a_member_that_decides_about_others_takes_a_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[nodes.Node | None] = []
    row = Members._row

    def seen(self: Members) -> nodes.Node | None:
        calls.append(row(self))
        return calls[-1]

    monkeypatch.setattr(Members, "_row", seen)
    schema = {"type": "object", "properties": {**FIELDS, "d": {}}, "minProperties": 2, "additionalProperties": False}
    language = language_of(JsonSchema(schema), Options(strict=False), token_rules=True)
    text = to_lark(language.node, language.rules)
    assert calls and calls[-1] is None
    assert accepted(text, '{"a":1,"c":true}') and not accepted(text, '{"a":1}') and not accepted(text, "{}")


@pytest.mark.parametrize(
    ("schema", "others"),
    [
        ({"type": "object", "properties": {}}, False),
        ({"allOf": [{"properties": {}}, {"properties": {"a": {}}}]}, False),
        ({"type": "object", "properties": {}, "additionalProperties": True}, True),
        ({"type": "object"}, True),
    ],
)
def test_an_object_that_lists_no_properties_used_to_have_any_in_strict_mode(schema: Any, others: bool) -> None:
    for strict in (True, False):
        language = language_of(JsonSchema(schema), Options(strict=strict), token_rules=True)
        text = to_lark(language.node, language.rules)
        assert accepted(text, "{}") and accepted(text, '{"b":1}') == (others or not strict)
