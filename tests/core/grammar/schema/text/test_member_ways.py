"""The ways of a walk over the members of objects that several schemas describe."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from graftlm.core.grammar.schema.algebra.shapes import NOTHING, Boolean, Not, Null, Object, both
from graftlm.core.grammar.schema.lowering import Lowering
from graftlm.core.grammar.schema.reading.json_schema import SchemaReader
from graftlm.core.grammar.schema.text.member_ways import MemberWays
from graftlm.core.grammar.spec import JsonSchema, Options
from tests.grammars import allows, compact, compiled


def test_names_that_a_part_forbids_are_not_walked() -> None:
    spec, options = JsonSchema(True), Options()
    lowering = Lowering(spec, options, SchemaReader(spec, options))
    others = [Not(Object((("a", Boolean()), (f"other{i}", Null())), required=(f"other{i}",))) for i in range(20)]
    formula = both(Object((("a", Boolean()), ("b", NOTHING)), additional=NOTHING), *others)
    ways = MemberWays(lowering.algebra, formula, {}, names_differ=False)
    first = ways.of(ways.start)
    assert [key for key, _, _ in first.present] == ["a"] and first.absent is not None
    last = ways.of(first.absent)
    assert last.ends and last.absent is None and not last.present
    assert len(ways.names) == 22  # none of which another member may have


@pytest.mark.parametrize("required", [[], ["c"]])
@pytest.mark.parametrize("strict", [True, False])
def test_an_alternative_that_requires_a_forbidden_name_excludes_nothing(required: list[str], strict: bool) -> None:
    first: dict[str, Any] = {
        "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}},
        "additionalProperties": False,
    }
    second = {"properties": {"a": {"type": "boolean"}, "c": {"type": "null"}}, "required": required}
    schema = {"type": "object", "oneOf": [first, {**second, "additionalProperties": False}]}
    grammar = compiled(JsonSchema(schema), strict=strict)
    validator = Draft202012Validator(schema)
    for names in (names for size in range(4) for names in combinations("abc", size)):
        value = {name: True if name == "a" else None for name in names}
        assert allows(grammar, compact(value)) == validator.is_valid(value), value


URL = {"format": "uri", "minLength": 1, "maxLength": 2083}
LONG = "x" * 2083


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"propertyNames": URL}, [{}, {"http://a.b/c": 1}], [{"x": 1}, {f"a:{LONG}": 1}, {"a:": "b"}]),
        ({"propertyNames": {**URL, "minLength": 500}}, [{f"a:{'x' * 500}": 1}], [{"a:": 1}]),
        ({"propertyNames": URL, "properties": {"a:": {}}, "required": ["a:"]}, [{"a:": 1, "b:": 2}], [{"b:": 2}]),
        ({"propertyNames": {"allOf": [URL, {"pattern": "^https://"}]}}, [{"https://a": 1}], [{"http://a": 1}]),
        ({"propertyNames": {"anyOf": [URL, {"const": "x"}]}}, [{"x": 1, "a:": 2}], [{"y": 1}]),
        ({"propertyNames": {"maxLength": 2083, "not": {"format": "uri"}}}, [{"x": 1}], [{"a:": 1}, {LONG + "x": 1}]),
        ({"propertyNames": {**URL, "pattern": "^[0-9]+$"}}, [{}], [{"1": 1}]),
    ],
)
def test_names_may_have_a_format_or_a_pattern_and_be_long(schema: dict[str, Any], right: Any, wrong: Any) -> None:
    grammar = compiled({"type": "object", "additionalProperties": {"type": "integer"}, **schema})
    assert all(allows(grammar, compact(value)) for value in right)
    assert not any(allows(grammar, compact(value)) for value in wrong)
