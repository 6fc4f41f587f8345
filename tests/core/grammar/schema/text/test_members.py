"""Members of objects."""

from __future__ import annotations

from typing import Any

import pytest

from graftlm.core.grammar.compile import language_of
from graftlm.core.grammar.engines.lark_writer import to_lark
from graftlm.core.grammar.spec import JsonSchema, Options
from tests.core.grammar.engines.test_lark_writer import accepted


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
        language = language_of(JsonSchema(schema), Options(strict=strict))
        text = to_lark(language.node, language.rules)
        assert accepted(text, "{}") and accepted(text, '{"b":1}') == (others or not strict)
