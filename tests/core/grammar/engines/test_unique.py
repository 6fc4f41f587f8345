"""`uniqueItems`: no two items of an array are equal, and there is always a way to go on."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from graftlm import Grammar, JsonSchema, Vocabulary
from graftlm.core.grammar.engines import unique
from graftlm.core.grammar.matcher import NO_ENDING, Matcher
from tests.grammars import BYTES, allows, compact, compiled

UNIQUE: dict[str, Any] = {"type": "array", "uniqueItems": True}
INTEGER = {"type": "integer"}
STRING = {"type": "string"}


def closed(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


KEYED = closed({"k": {"enum": [1, 2]}}, "k")
NAMED = closed({"k": {"enum": [1, 2]}, "name": STRING, "after": {"type": "boolean"}}, "after")


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({**UNIQUE, "items": INTEGER}, [[], [1, 2], [12, 1, 2]], [[1, 1], [1, 2, 1], [0, 0]]),
        ({**UNIQUE, "items": STRING}, [["a", "ab"], ["a\\", "a"]], [["a", "a"], ["é", "é"]]),
        ({**UNIQUE, "items": {"enum": ["a", "b", "c"]}, "minItems": 2}, [["c", "b", "a"]], [["a"], ["b", "b"]]),
        ({**UNIQUE, "items": {"type": "boolean"}}, [[True, False]], [[True, True], [True, False, True]]),
        ({**UNIQUE, "items": {"type": ["number", "string"]}}, [[1, "1", 2, 0.5]], [[1, 1], [0.5, 0.5]]),
        (UNIQUE, [[1, "1", [1], True]], [[{"a": 1, "b": 2}, {"b": 2, "a": 1.0}], [[1], [1.0]]]),
        ({**UNIQUE, "items": KEYED}, [[{"k": 1}, {"k": 2}]], [[{"k": 1}, {"k": 1}]]),
        ({**UNIQUE, "items": {"type": "object"}}, [[{}, {"k": 1}]], [[{"k": 1}, {"k": 1}], [{}, {}]]),
        ({"type": "array", "items": {**UNIQUE, "items": INTEGER}}, [[[1], [1]]], [[[1], [2, 2]]]),
        ({"anyOf": [{**UNIQUE, "items": INTEGER}, STRING]}, [[1], "a"], [[1, 1]]),
        ({"allOf": [{"items": STRING, "type": "array"}, {"uniqueItems": True}]}, [["a"]], [["a", "a"]]),
    ],
)
def test_equal_items_are_refused(schema: dict[str, Any], good: list[Any], bad: list[Any]) -> None:
    grammar = compiled(schema, strict=False)
    assert [value for value in good if not allows(grammar, compact(value))] == []
    assert [value for value in bad if allows(grammar, compact(value))] == []


def test_only_the_arrays_that_ask_for_it_are_watched() -> None:
    schema = {"properties": {"a": {"type": "array", "items": INTEGER}, "b": {"$ref": "#/$defs/u"}}}
    grammar = compiled({**schema, "$defs": {"u": {**UNIQUE, "items": INTEGER}}})
    assert allows(grammar, '{"a":[1,1],"b":[1]}') and not allows(grammar, '{"b":[1,1]}')


def test_an_item_that_is_compared_as_text_has_one_spelling() -> None:
    grammar = compiled({**UNIQUE, "items": {"type": ["string", "number"]}})
    for text in (r'["\/"]', "[1.50]", "[1e1]", "[-0]", r'["\u000a"]'):
        assert not allows(grammar, text), text


def test_names_that_are_counted_come_once() -> None:
    grammar = compiled({"type": "object", "minProperties": 2})
    assert allows(grammar, '{"a":1,"b":1}') and not allows(grammar, '{"a":1,"a":1}')


def allowed(matcher: Matcher) -> bytes:
    row = np.zeros(BYTES.num_words, np.int32)
    matcher.fill_mask(row)
    return bytes(i for i in range(256) if row[i >> 5] >> (i & 31) & 1)


def test_a_token_that_would_leave_only_an_equal_item_is_masked() -> None:
    matcher = compiled({**UNIQUE, "items": {"enum": ["a", "ab", "b"]}}).matcher()
    matcher.advance(list(b'["ab","a'))
    assert allowed(matcher) == b'"'
    matcher.advance(list(b'","'))
    assert allowed(matcher) == b"b"
    matcher.advance(list(b'b"'))
    assert allowed(matcher) == b"]"


def test_a_closed_object_differs_by_its_last_free_member() -> None:
    matcher = compiled({**UNIQUE, "items": NAMED}, strict=False).matcher()
    matcher.advance(list(b'[{"k":1,"name":"x","after":true},{"k":1,"'))
    assert allowed(matcher) == b"an"  # "after" may come at once: the first item has a name
    matcher.advance(list(b'name":"x'))
    assert b'"' not in allowed(matcher)


TOKENS = [bytes([byte]) for byte in range(256)]
TOKENS += [
    b'["',
    b'","',
    b'"]',
    b"1,",
    b",1",
    b'"a","',
    b'{"',
    b"},{",
    b"}]",
    b"ab",
    b'"a',
    b'a"',
    b"[1,1]",
    b'["a","a"]',
]
MERGED = Vocabulary([*TOKENS, b""], eos_token_id=len(TOKENS))


def write_at_random(grammar: Grammar, rng: np.random.Generator) -> bytes:
    """Write a text with tokens from the masks, which have to be those that the matcher takes, and its ending."""
    matcher, text, left = grammar.matcher(), b"", int(rng.choice([0, 2, 6, 20, 60]))
    row = np.zeros(MERGED.num_words, np.int32)
    while left > 0:
        matcher.fill_mask(row)
        ids = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        assert len(ids), text
        if rng.random() < 0.05:
            assert [i for i in range(len(TOKENS)) if matcher.fork().advance([i])] == [i for i in ids if i < len(TOKENS)]
        likely = [i for i in ids if i >= 256 or i in b'",:[]{}a01tfn']
        chosen = int(rng.choice(likely or ids))
        if chosen == len(TOKENS):
            return text
        assert matcher.advance([chosen]) == 1
        text += TOKENS[chosen]
        left -= 1
    ending = matcher.ending([])
    assert len(ending) <= matcher.min_tokens_to_accept() and matcher.advance(ending) == len(ending)
    assert matcher.accepting
    return text + MERGED.decode(ending)


@pytest.mark.parametrize(
    "schema",
    [
        {**UNIQUE, "items": {"enum": ["a", "ab", "b"]}, "minItems": 3},
        {**UNIQUE, "items": {"type": "integer", "minimum": 0, "maximum": 12}, "minItems": 13},
        {**UNIQUE, "items": INTEGER, "minItems": 3},
        {**UNIQUE, "items": {"type": "string", "pattern": "^(a|b[0-9]?)$"}, "minItems": 4},
        {**UNIQUE, "items": {"type": "string", "maxLength": 1}, "minItems": 4},
        {**UNIQUE, "items": {"type": "object", "properties": {"k": {"type": "boolean"}}}, "minItems": 3},
        {**UNIQUE, "items": {"type": "number", "minimum": 0, "maximum": 1}, "minItems": 3},
        {**UNIQUE, "minItems": 3},
        {**UNIQUE, "minItems": 2, "items": {"type": "array"}},
        {**UNIQUE, "minItems": 3, "items": {"type": "object"}},
        {**UNIQUE, "minItems": 3, "items": NAMED},
        {**UNIQUE, "minItems": 2, "items": closed({"k": {"enum": [1]}, "bag": {"type": "object"}, "n": {}}, "n")},
        {"$ref": "#/$defs/few", "uniqueItems": True, "minItems": 2, "$defs": {"few": {"items": {"enum": [1, 2, 3]}}}},
        {"allOf": [{"items": {"enum": [1, 2, "a"]}}, {"items": {"type": "integer"}}, UNIQUE], "minItems": 2},
        {"properties": {"c": {"$ref": "#"}, "t": {**UNIQUE, "items": STRING, "minItems": 2}}},
        {"type": "object", "minProperties": 3},
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_texts_are_valid_and_end_wherever_they_are(schema: dict[str, Any], strict: bool) -> None:
    from jsonschema import Draft202012Validator

    grammar = Grammar.compile(JsonSchema(schema), MERGED, strict=strict)
    rng = np.random.default_rng(0)
    for _ in range(10):
        text = write_at_random(grammar, rng)
        Draft202012Validator(schema).validate(json.loads(text))


def test_searches_of_endings_take_bounded_time_of_a_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = {"type": "array", "items": {"type": "string"}, "uniqueItems": True, "minItems": 3}
    matcher = compiled(schema).matcher()
    usual = matcher.ending(())
    assert json.loads(BYTES.decode(usual)) and matcher.min_tokens_to_accept() == len(usual)
    monkeypatch.setattr(unique, "_ENDINGS_S", 0.0)  # is spent
    assert matcher.advance(list(b'["')) == 2
    assert matcher.min_tokens_to_accept() == NO_ENDING
    matcher.rollback(2)
    assert matcher.ending(()) == usual


def test_steps_can_be_undone_and_forks_are_apart() -> None:
    matcher = compiled({**UNIQUE, "items": INTEGER}).matcher()
    assert matcher.advance(list(b"[1,1,")) == 4
    fork = matcher.fork()
    assert fork.advance(list(b"2]")) == 2 and matcher.advance(list(b",")) == 0
    matcher.rollback(2)
    assert matcher.advance(list(b",3]")) == 3 and matcher.accepting
