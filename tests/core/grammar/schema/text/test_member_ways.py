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
