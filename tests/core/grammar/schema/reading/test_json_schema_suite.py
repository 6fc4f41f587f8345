"""The official JSON Schema test suite, and schemas made at random, with `jsonschema` as the judge."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
from hypothesis import assume, given, settings, strategies as st
from jsonschema import Draft202012Validator

from bench.grammar import suite
from graftlm.core.errors import GrammarError
from tests.grammars import BYTES, allows, compact, compiled


@pytest.mark.parametrize("draft", suite.DRAFTS)
def test_no_invalid_instance_is_accepted_and_more_are_right_than_with_llguidance_alone(draft: str) -> None:
    ours, theirs = suite.judge(partial(suite.graftlm, strict=False), draft), suite.judge(suite.llguidance, draft)
    assert ours.lets_through == []
    assert ours.num_right > 1.25 * theirs.num_right
    assert len(theirs.lets_through) > 20  # what the reading of schemas here is for


@pytest.mark.parametrize("draft", suite.DRAFTS)
def test_strict_mode_accepts_no_invalid_instance_either(draft: str) -> None:
    assert suite.judge(suite.graftlm, draft).lets_through == []


NAMES = st.sampled_from(["a", "b", "ab", "x-a"])
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-5, 30)
    | st.sampled_from([0.5, 2.25])
    | st.sampled_from(["", "a", "ab1", 'é"'])
)
BOUNDS = st.fixed_dictionaries({}, optional={"minimum": st.integers(-3, 5), "maximum": st.integers(5, 20)})
TEXTS = st.fixed_dictionaries(
    {"type": st.just("string")},
    optional={
        "minLength": st.integers(0, 2),
        "maxLength": st.integers(2, 4),
        "pattern": st.sampled_from(["^a", "[0-9]", "b$", "^[a-b]*$", "a|é"]),
    },
)
LEAVES = st.one_of(
    st.booleans(),
    st.sampled_from([{"type": "null"}, {"type": "boolean"}, {}]),
    BOUNDS.map(lambda b: {"type": "integer", **b}),
    BOUNDS.map(lambda b: {"type": "number", **b}),
    TEXTS,
    st.lists(SCALARS, min_size=1, max_size=3).map(lambda values: {"enum": values}),
    SCALARS.map(lambda value: {"const": value}),
)


def _compound(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    members = st.dictionaries(NAMES, inner, max_size=3)
    return st.one_of(
        st.fixed_dictionaries(
            {"type": st.just("object"), "properties": members},
            optional={
                "required": st.lists(NAMES, max_size=2, unique=True),
                "additionalProperties": inner,
                "patternProperties": st.dictionaries(st.sampled_from(["^x-", "b$"]), inner, max_size=2),
                "maxProperties": st.integers(1, 3),
                "minProperties": st.integers(0, 1),
                "propertyNames": TEXTS,
                "dependentRequired": st.dictionaries(NAMES, st.lists(NAMES, max_size=1), max_size=1),
            },
        ),
        st.fixed_dictionaries(
            {"type": st.just("array"), "items": inner},
            optional={
                "prefixItems": st.lists(inner, min_size=1, max_size=2),
                "minItems": st.integers(0, 2),
                "maxItems": st.integers(2, 3),
            },
        ),
        *(
            st.lists(inner, min_size=1, max_size=3).map(lambda items, keyword=keyword: {keyword: items})
            for keyword in ("anyOf", "oneOf", "allOf")
        ),
    )


SCHEMAS = st.recursive(LEAVES, _compound, max_leaves=6)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES | st.just("zz"), inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=150)
@given(SCHEMAS, st.lists(VALUES, min_size=10, max_size=20), st.booleans())
def test_what_is_accepted_is_valid(schema: Any, values: list[Any], strict: bool) -> None:
    try:
        grammar = compiled(schema, strict=strict)
    except GrammarError:
        assume(False)
    judge = Draft202012Validator(schema)
    for value in values:
        assert not allows(grammar, compact(value)) or judge.is_valid(value), (schema, value)
    matcher = grammar.matcher()
    ending = BYTES.decode(matcher.ending([]))
    if matcher.accepting or ending:
        assert judge.is_valid(json.loads(ending)), (schema, ending)


@settings(max_examples=100)
@given(SCHEMAS, st.lists(VALUES, min_size=5, max_size=10))
def test_what_both_engines_take_they_read_alike(schema: Any, values: list[Any]) -> None:
    try:
        fsm = compiled(schema, engine="fsm")
    except GrammarError:
        assume(False)
    llguidance = compiled(schema, engine="llguidance")
    for value in values:
        assert allows(fsm, compact(value)) == allows(llguidance, compact(value)), (schema, value)


def test_the_empty_text_is_no_comment_of_lark() -> None:
    """llguidance reads two slashes as the beginning of a comment."""
    grammar = compiled({"oneOf": [{"type": "string"}, {"const": ""}]}, engine="llguidance")
    assert [allows(grammar, text) for text in ('""', '"a"', "1")] == [False, True, False]
