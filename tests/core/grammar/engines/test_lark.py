"""The Lark text of a constraint: rows of optional parts are written as the walk of any graph writes them."""

from __future__ import annotations

from typing import Any

import pytest

from graftlm.core.grammar import ast
from graftlm.core.grammar.compile import language_of
from graftlm.core.grammar.engines import lark
from graftlm.core.grammar.engines.optional_row import is_optional_row
from graftlm.core.grammar.spec import JsonSchema, Options

NAMES = ["id", "name", "a_longer_name", "tags", "e"]
VALUES: list[dict[str, Any]] = [
    {"type": "integer"},
    {"type": "array", "items": {"$ref": "#/$defs/tree"}},
    {"enum": ["x", "y"]},
    {"$ref": "#/$defs/tree"},
    {"type": "boolean"},
]


def of_members(num: int) -> JsonSchema:
    fields = dict(zip(NAMES[:num], VALUES, strict=False))
    tree = {"type": "object", "properties": {**fields, "below": {"$ref": "#/$defs/tree"}}}
    return JsonSchema({"$ref": "#/$defs/tree", "$defs": {"tree": tree}})


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("num", range(1, 6))
def test_a_row_of_optional_members_has_the_text_of_a_walk(
    num: int, strict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[bool] = []

    def seen(node: ast.Graph) -> bool:
        rows.append(is_optional_row(node))
        return rows[-1]

    language = language_of(of_members(num), Options(strict=strict), token_rules=True)
    monkeypatch.setattr(lark, "is_optional_row", seen)
    found = lark.to_lark(language.node, language.rules)
    assert any(rows)
    monkeypatch.setattr(lark, "is_optional_row", lambda node: False)
    assert lark.to_lark(language.node, language.rules) == found
