"""`uniqueItems`: no two items of an array are equal, and there is always a way to go on."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import pytest

from bench.grammar.validity import write
from graftlm.core.errors import GrammarError
from graftlm.core.grammar.matcher import Matcher
from graftlm.core.grammar.schema.lowering import lower_schema
from graftlm.core.grammar.spec import JsonSchema, Options
from tests.grammars import BYTES, allows, compact, compiled

UNIQUE: dict[str, Any] = {"type": "array", "uniqueItems": True}
INTEGER = {"type": "integer"}
KEYED = {"type": "object", "properties": {"k": {"enum": [1, 2]}}, "required": ["k"]}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({**UNIQUE, "items": INTEGER}, [[], [1, 2], [12, 1, 2]], [[1, 1], [1, 2, 1], [0, 0]]),
        ({**UNIQUE, "items": {"type": "string"}}, [["a", "ab"], ["a\\", "a"]], [["a", "a"], ["é", "é"]]),
        ({**UNIQUE, "items": {"enum": ["a", "b", "c"]}, "minItems": 2}, [["c", "b", "a"]], [["a"], ["b", "b"]]),
        ({**UNIQUE, "items": {"type": "boolean"}}, [[True, False]], [[True, True], [True, False, True]]),
        ({**UNIQUE, "items": {"type": ["number", "string"]}}, [[1, "1", 2]], [[1, 1.0], [10, 1e1]]),
        (UNIQUE, [[1, "1", [1], True]], [[1, 1.0], [{"a": 1, "b": 2}, {"b": 2, "a": 1}], [[1], [1]]]),
        ({**UNIQUE, "items": KEYED}, [[{"k": 1}, {"k": 2}]], [[{"k": 1}, {"k": 1}]]),
        ({**UNIQUE, "prefixItems": [INTEGER], "items": {"type": "string"}}, [[1, "a"]], [[1, "a", "a"]]),
        ({"type": "array", "items": {**UNIQUE, "items": INTEGER}}, [[[1], [1]]], [[[1], [2, 2]]]),
    ],
)
def test_equal_items_are_refused(schema: dict[str, Any], good: list[Any], bad: list[Any]) -> None:
    grammar = compiled(schema)
    assert [value for value in good if not allows(grammar, compact(value))] == []
    assert [value for value in bad if allows(grammar, compact(value))] == []


def test_only_the_arrays_that_ask_for_it_are_watched() -> None:
    schema = {"properties": {"a": {"type": "array", "items": INTEGER}, "b": {"$ref": "#/$defs/u"}}}
    grammar = compiled({**schema, "$defs": {"u": {**UNIQUE, "items": INTEGER}}})
    assert allows(grammar, '{"a":[1,1],"b":[1]}') and not allows(grammar, '{"b":[1,1]}')


def test_items_are_equal_however_they_are_spelled() -> None:
    grammar = compiled({**UNIQUE, "items": {"type": ["string", "number"]}})
    for text in (r'["/","\/"]', "[1.50,1.5]", "[10,1e1]"):
        assert not allows(grammar, text), text


def allowed(matcher: Matcher) -> bytes:
    row = np.zeros(BYTES.num_words, np.int32)
    matcher.fill_mask(row)
    return bytes(i for i in range(256) if row[i >> 5] >> (i & 31) & 1)


@pytest.mark.parametrize(
    "schema",
    [
        {**UNIQUE, "items": {"enum": ["a", "ab", "b"]}, "minItems": 2},
        {**UNIQUE, "items": {"type": "integer", "minimum": 0, "maximum": 12}, "minItems": 5},
        {**UNIQUE, "items": INTEGER, "minItems": 3},
        {**UNIQUE, "items": {"type": "string", "pattern": "^(a|b[0-9]?)$"}, "minItems": 4},
        {**UNIQUE, "items": {"type": "object", "properties": {"k": {"type": "boolean"}}}, "minItems": 2},
        {**UNIQUE, "items": {"type": "number", "minimum": 0, "maximum": 1}, "minItems": 3},
        {**UNIQUE, "minItems": 2},
        {**UNIQUE, "minItems": 2, "items": UNIQUE},
        {**UNIQUE, "minItems": 2, "items": {"type": "object"}},
        {**UNIQUE, "minItems": 2, "items": {"type": ["null", "number", "array"]}},
        {"$ref": "#/$defs/few", "uniqueItems": True, "minItems": 2, "$defs": {"few": {"items": {"enum": [1, 2, 3]}}}},
        {"allOf": [{"items": {"enum": [1, 2, "a"]}}, {"items": {"type": "integer"}}, UNIQUE], "minItems": 2},
        {**UNIQUE, "items": {"type": "number", "minimum": 2, "maximum": 6, "multipleOf": 0.5}, "minItems": 7},
        {**UNIQUE, "items": {"type": ["number", "null"], "multipleOf": 10, "minimum": 0, "maximum": 20}, "minItems": 2},
        {**UNIQUE, "contains": {"type": "null"}, "unevaluatedItems": {"minimum": -1, "maximum": 10}, "minItems": 1},
        {**UNIQUE, "anyOf": [{"items": {"enum": [1, 2, 3]}}, {"items": {"enum": ["a", "b"]}}], "minItems": 1},
        {**UNIQUE, "anyOf": [{"items": {"enum": [1, 2]}, "maxItems": 1}, {"items": {"enum": [1, 3]}}], "minItems": 1},
        {**UNIQUE, "prefixItems": [{"const": 1}], "items": {"enum": [2, 4, "a"]}, "minItems": 2},
        {**UNIQUE, "prefixItems": [{"enum": [1, 2, 3]}, {"enum": [1, 2]}, {"enum": [1]}], "minItems": 3},
        {**UNIQUE, "prefixItems": [{"enum": [1, 2, 3]}], "items": {"enum": [1, 2]}, "minItems": 3},
        {**UNIQUE, "prefixItems": [{"enum": ["a", "b"]}, {"enum": ["b"]}], "items": {"type": "string"}, "minItems": 3},
        {**UNIQUE, "prefixItems": [INTEGER], "items": {"enum": [1, 2, 3, 4]}, "minItems": 5},
    ],
)
def test_texts_written_at_random_never_run_out_of_ways(schema: dict[str, Any]) -> None:
    grammar, rng = compiled(schema), np.random.default_rng(0)
    for _ in range(25):
        data, _ = write(grammar, BYTES, rng, int(rng.integers(40, 70)))
        items = json.loads(data, parse_float=str)  # beyond float64 readers differ
        assert len({json.dumps(item, sort_keys=True) for item in items}) == len(items) >= schema["minItems"], data


@pytest.mark.parametrize("text", ["[2.50,2.0,3]", "[2.5,3.0,2.00]", "[3,2,2.5]", "[2.0,2.5,3.00]"])
def test_every_spelling_of_the_numbers_that_are_left_may_be_written(text: str) -> None:
    assert allows(
        compiled({**UNIQUE, "items": {"type": "number", "minimum": 2, "maximum": 3, "multipleOf": 0.5}}), text
    )


def test_arrays_under_not_may_have_other_items_than_the_excluded_ones() -> None:
    excluded = {"type": "array", "items": {"type": "null"}, "uniqueItems": True, "maxItems": 2}
    schema = {"properties": {"b": {"type": "array", "minItems": 2}}, "not": {"properties": {"b": excluded}}}
    assert allows(compiled(schema), '{"b":[null,1]}')


def test_an_alternative_with_other_items_goes_on_where_one_has_run_out() -> None:
    schema = {**UNIQUE, "anyOf": [{"items": {"enum": [1, 2]}}, {"items": INTEGER}]}
    assert allows(compiled(schema, strict=False), "[1,2,3,4]")
    kinds = {**UNIQUE, "items": [{"enum": ["x"]}], "additionalItems": {"anyOf": [UNIQUE, {"items": {"const": 1}}]}}
    assert allows(compiled(kinds, strict=False), '["x",[1,2],[1,3],[2,1]]')


def test_a_mask_leaves_out_what_would_repeat_an_item() -> None:
    matcher = compiled({**UNIQUE, "items": {"enum": [1, 2]}}).matcher()
    assert matcher.advance(list(b"[1,")) == 3
    assert allowed(matcher) == b"2"
    assert matcher.advance(list(b"2")) == 1 and allowed(matcher) == b"]"
    matcher.rollback(2)
    twin = matcher.fork()
    assert allowed(matcher) == b",]" and twin.ending([]) == list(b"]")


def test_items_that_a_text_comes_to_late_used_to_be_taken_for_unlimited_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    matcher = compiled({**UNIQUE, "items": {"enum": ["a", "b"]}}).matcher()
    with monkeypatch.context() as patched:
        late, spent = time.monotonic() + 3600, time.thread_time() + 3600
        patched.setattr(time, "monotonic", lambda: late)
        patched.setattr(time, "thread_time", lambda: spent)
        assert matcher.advance(list(b'["a","a')) == 6


@pytest.mark.parametrize(
    ("schema", "pointer", "told"),
    [
        (
            {"items": {"type": "boolean"}, "minItems": 3},
            "/minItems",
            "asks for 3 items and uniqueItems leaves 2 at most",
        ),
        ({"items": {"enum": [1, 1.0, 2]}, "minItems": 3}, "/minItems", "uniqueItems leaves 2 at most"),
        (
            {"items": {"type": "integer", "minimum": 0, "exclusiveMaximum": 9, "multipleOf": 3}, "minItems": 4},
            "/minItems",
            "uniqueItems leaves 3 at most",
        ),
        ({"prefixItems": [{"const": 1}, {"const": 1}], "minItems": 2}, "/minItems", "uniqueItems leaves 1 at most"),
        ({"contains": {"type": "null"}, "minContains": 2}, "/contains", "more items than its schema has values"),
    ],
)
def test_more_items_than_there_are_values_is_an_error(schema: dict[str, Any], pointer: str, told: str) -> None:
    """Such schemas compiled, and each text ended in an error."""
    with pytest.raises(GrammarError, match=told) as error:
        compiled({**UNIQUE, **schema})
    assert error.value.pointer == pointer


def test_values_that_later_items_need_are_masked() -> None:
    first_of_three = {**UNIQUE, "prefixItems": [{"enum": [1, 2, 3]}, {"enum": [1, 2]}, {"enum": [1]}], "minItems": 3}
    grammar = compiled(first_of_three)
    assert allows(grammar, "[3,2,1]") and not allows(grammar, "[3,1,2]") and not allows(grammar, "[2,1,3]")
    matcher = grammar.matcher()
    matcher.advance(list(b"["))
    assert allowed(matcher) == b"3"


def test_inside_a_larger_grammar_it_is_refused() -> None:
    with pytest.raises(GrammarError, match="in a larger grammar"):
        lower_schema(JsonSchema(UNIQUE), Options())


UNIQUE_BITS = {**UNIQUE, "items": {"enum": [0, 1]}}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "array", "not": {**UNIQUE, "items": INTEGER}}, [["a"], [1, "a"], ["a", "a"]], [[], [1, 2]]),
        ({"type": "array", "oneOf": [{**UNIQUE, "minItems": 1}, {"items": INTEGER}]}, [[], ["a"]], [[1], ["a", "a"]]),
        ({"if": {**UNIQUE, "minItems": 2}, "then": {"contains": {"const": 0}}}, [[], [1], [0, 1]], [[1, 2], [3, 1]]),
        ({"not": {"not": UNIQUE}}, [[], [0, 1]], [[0, 0]]),
        ({"not": {"properties": {"p": {"not": UNIQUE_BITS}}}}, [{"p": [0, 1]}], [{"p": [0, 0]}, {"p": [2]}, {}, 1]),
        ({"contains": UNIQUE, "maxContains": 1, "type": "array"}, [[[0, 1]], [1, []]], [[[0, 0]], [[0], [1]]]),
        ({"type": "array", "items": {"enum": ["a", "ab"]}, "not": {**UNIQUE, "items": {"const": "a"}}, "minItems": 2},
         [["ab", "a"], ["a", "ab"]], [["a", "a"]]),
    ],
)  # fmt: skip
def test_unique_items_may_be_excluded(schema: dict[str, Any], good: list[Any], bad: list[Any]) -> None:
    grammar = compiled(schema, strict=False)
    assert [value for value in good if not allows(grammar, compact(value))] == []
    assert [value for value in bad if allows(grammar, compact(value))] == []


def test_arrays_that_only_equal_items_could_satisfy_are_refused() -> None:
    with pytest.raises(GrammarError, match="never written with equal items to escape a 'uniqueItems'"):
        compiled({"type": "array", "not": UNIQUE})


@pytest.mark.parametrize(
    "begun", ["[null,n", "[true,false,null,t", "[0,0e", "[0,-0.0E", '["",0,1,2,3,4,5,6,7,8,9,{},[],""']
)
def test_a_way_that_leads_nowhere_but_to_an_equal_item_is_masked(begun: str) -> None:
    matcher = compiled(UNIQUE).matcher()
    data = list(begun.encode())
    assert matcher.advance(data) == len(data) - 1


def test_an_exponent_that_is_as_long_as_it_may_be_does_not_spell_a_number_that_is_there() -> None:
    """`1e00` was allowed, and nothing after it."""
    matcher = compiled(UNIQUE, bounded_numbers=True).matcher()
    assert matcher.advance(list(b"[1,1e0")) == 6
    assert allowed(matcher) and b"0"[0] not in allowed(matcher)


@pytest.mark.parametrize(
    "begun",
    [
        "[0,1,2,3,4,5,6,7,8,9,",
        "[null,true,false,",
        '["","',
        "[[],[",
        "[{},{",
        '[{"0":0},{"0',
        "[[0],[1],[",
        "[1,1",
        "[0,0.",
    ],
)
def test_an_ending_is_found_wherever_the_mask_leads(begun: str) -> None:
    matcher = compiled(UNIQUE).matcher()
    data = list(begun.encode())
    assert matcher.advance(data) == len(data)
    ending = matcher.ending([])
    items = json.loads(bytes(data + ending))
    assert matcher.min_tokens_to_accept() == len(ending) <= 12
    assert len({json.dumps(item) for item in items}) == len(items)


@pytest.mark.parametrize(
    ("item", "most"),
    [
        ({"type": "string", "pattern": "b$"}, 16),
        ({"type": "string", "pattern": "^[a-z]{2}-[A-Z]{2}$"}, 1 + 3 * 8),
        ({"type": "string", "format": "date"}, 1 + 3 * 13),
        ({"type": "integer", "minimum": 100, "multipleOf": 7}, 1 + 3 * 5),
    ],
)
def test_the_items_of_an_ending_differ_whatever_pattern_they_have(item: dict[str, Any], most: int) -> None:
    matcher = compiled({**UNIQUE, "items": item, "minItems": 3}).matcher()
    ending = matcher.ending([])
    assert len(set(json.loads(bytes(ending)))) == 3
    assert matcher.min_tokens_to_accept() == len(ending) <= most


LETTERED = {
    "type": "object",
    "properties": {"k": {"enum": ["a", "b"]}},
    "required": ["k"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "schema",
    [
        {**UNIQUE, "items": LETTERED, "minItems": 3},
        {**UNIQUE, "items": {**UNIQUE, "items": {"type": "boolean"}}, "minItems": 6},
        {**UNIQUE, "items": {"enum": [1, 2]}, "not": {"maxItems": 2}},
        {"items": {"type": "boolean"}, "allOf": [{**UNIQUE, "minItems": 2, "items": {"enum": ["b", True]}}]},
        {"type": "array", "items": {"type": "integer"}, "contains": {"type": "boolean"}},
        {**UNIQUE, "prefixItems": [{"const": None}, {"type": "null"}], "contains": {"type": "boolean"}},
    ],
)
def test_more_items_than_there_are_values_of_any_kind_are_a_contradiction(schema: dict[str, Any]) -> None:
    with pytest.raises(GrammarError, match="nothing can satisfy this"):
        compiled(schema)


FEW = [
    ({"type": "string", "pattern": "^(a|b)?c{0,2}$"}, 9),
    ({"type": "string", "maxLength": 0}, 1),
    ({"type": "number", "multipleOf": 0.5, "minimum": 1, "exclusiveMaximum": 2}, 2),
    ({"type": "number", "minimum": 2.5, "maximum": 2.5}, 1),
    ({"type": "integer", "multipleOf": 3, "minimum": 10**30, "maximum": 10**30 + 8}, 3),
    ({"type": "array", "items": {"type": "boolean"}, "maxItems": 2}, 7),
    ({"type": "array", "prefixItems": [{"type": "null"}, {"type": "boolean"}], "items": False}, 4),
    ({"type": "object", "maxProperties": 0}, 1),
]


@pytest.mark.parametrize(("item", "num_values"), FEW)
def test_as_many_items_as_there_are_values_are_written_and_one_more_is_a_contradiction(
    item: dict[str, Any], num_values: int
) -> None:
    grammar = compiled({**UNIQUE, "items": item, "minItems": num_values})
    items = json.loads(write(grammar, BYTES, np.random.default_rng(1), 400)[0])
    assert len({json.dumps(value) for value in items}) == len(items) == num_values
    with pytest.raises(GrammarError, match=f"uniqueItems leaves {num_values} at most") as caught:
        compiled({**UNIQUE, "items": item, "minItems": num_values + 1})
    assert caught.value.pointer == "/minItems"


def test_an_array_ends_before_a_place_that_has_no_value_left() -> None:
    schema = {**UNIQUE, "prefixItems": [{"enum": [1, 2]}, {"const": 3}, {"enum": [1, 2]}, {"enum": [1, 2, 3]}]}
    grammar = compiled({**schema, "contains": {"enum": [3, "a"]}}, strict=False)
    good = [[1, 3], [2, 3], [1, 3, 2], [2, 3, 1]]
    assert {write(grammar, BYTES, np.random.default_rng(seed), 60)[0].decode() for seed in range(20)} == set(
        map(compact, good)
    )


def test_objects_of_few_values_are_written_until_none_is_left() -> None:
    grammar = compiled({**UNIQUE, "items": LETTERED, "minItems": 2})
    texts = {write(grammar, BYTES, np.random.default_rng(seed), 60)[0] for seed in range(20)}
    assert texts == {b'[{"k":"a"},{"k":"b"}]', b'[{"k":"b"},{"k":"a"}]'}


TWO_NULLS: dict[str, Any] = {"items": {"type": "null"}, "minItems": 2}


def test_a_condition_on_other_kinds_asks_no_items_to_differ() -> None:
    """`[` was in the mask and not accepted, and no such array was."""
    number_or_unique = {"if": {"type": "number"}, "then": {"type": "array", "uniqueItems": True}}
    grammar = compiled({"type": "array", "items": {"type": "array", **TWO_NULLS, **number_or_unique}})
    assert allows(grammar, "[[null,null],[null,null,null]]")


def test_an_array_whose_items_cannot_differ_is_not_in_the_mask() -> None:
    grammar = compiled({"type": "array", "items": TWO_NULLS, "contains": {"uniqueItems": True}}, strict=False)
    matcher = grammar.matcher()
    assert matcher.advance(b"[0,") == 3
    accepted = [byte for byte in range(256) if matcher.fork().advance([byte]) == 1]
    assert list(allowed(matcher)) == accepted
