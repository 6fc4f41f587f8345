"""No text dies whose items must differ: what leaves no way to end it is not in the mask."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from bench.grammar.validity import write
from graftlm import GrammarError
from graftlm.core.grammar.spec import JsonSchema
from tests.grammars import BYTES, allows, compiled

UNIQUE: dict[str, Any] = {"type": "array", "uniqueItems": True}
LETTERS: dict[str, Any] = {"items": {"enum": ["a", "b", "c", "d", "e"]}, "minItems": 3}
NULLS: dict[str, Any] = {"type": "array", "items": {"type": "null"}, "minItems": 2, "maxItems": 4}
FLAGS: dict[str, Any] = {**UNIQUE, "items": {"type": "boolean"}}
ENDS_IN_B: dict[str, Any] = {"properties": {"k": {"type": "string", "pattern": "b$"}}, "required": ["k"]}
DYING: dict[str, dict[str, Any]] = {
    "all unique arrays of two values": {**UNIQUE, "items": {**UNIQUE, "items": {"enum": [0, 1]}}, "minItems": 5},
    "both full unique arrays": {**UNIQUE, "items": {**FLAGS, "minItems": 2}, "minItems": 2},
    "one of three letters": {**UNIQUE, **LETTERS, "contains": {"enum": ["c", "d", "e"]}, "maxContains": 1},
    "a plain or a unique array": {"anyOf": [NULLS, {**UNIQUE, "items": {"type": "integer"}}]},
    "a member that is one of them": {
        "type": "object",
        "properties": {"v": {"anyOf": [NULLS, {**FLAGS, "minItems": 2}]}},
        "required": ["v"],
    },
    "an item that may be what is contained": {
        "type": "array",
        "prefixItems": [{"type": "null"}],
        "maxItems": 2,
        "contains": {**UNIQUE, "items": {"type": "integer", "multipleOf": 7}, "minItems": 2},
    },
    "objects whose only member ends alike": {**UNIQUE, "items": {"type": "object", **ENDS_IN_B}, "minItems": 4},
}


@pytest.mark.parametrize("schema", DYING.values(), ids=DYING)
@pytest.mark.parametrize("engine", [None, "llguidance"])
def test_every_text_is_whole_and_valid_whatever_the_budget(schema: dict[str, Any], engine: str | None) -> None:
    grammar = compiled(schema, engine=engine, bounded_numbers=True)
    least = grammar.matcher().min_tokens_to_accept()
    for seed in range(12):
        data, _ = write(grammar, BYTES, np.random.default_rng(seed), least + 3 * seed)
        assert Draft202012Validator(schema).is_valid(json.loads(data))


def test_equal_items_are_written_where_the_alternative_that_forbids_them_is_impossible() -> None:
    two_nulls = {"items": {"type": "null"}, "minItems": 2, "anyOf": [{"maxItems": 3}, UNIQUE]}
    assert allows(compiled({"type": "array", "items": two_nulls}), "[[null,null],[null,null,null]]")


def test_an_ending_that_is_known_gets_shorter_by_each_of_its_tokens() -> None:
    matcher = compiled(DYING["all unique arrays of two values"]).matcher()
    ending = matcher.ending([])
    assert sorted(json.loads(bytes(ending))) == [[], [0], [0, 1], [1], [1, 0]]
    for position, token_id in enumerate(ending):
        assert matcher.min_tokens_to_accept() == len(ending) - position
        assert matcher.advance([token_id]) == 1
    assert matcher.accepting


HIDDEN: dict[str, Any] = {  # only [true], [true,false] and [false,true] may be items
    "type": "object",
    "properties": {"v": {**UNIQUE, "items": {**FLAGS, "contains": {"const": True}, "minItems": 1}, "minItems": 4}},
    "required": ["v"],
}


def test_a_schema_of_which_no_text_is_found_is_refused_when_it_is_compiled() -> None:
    with pytest.raises(GrammarError, match="no text is found that keeps uniqueItems.*lower minItems") as caught:
        compiled(HIDDEN)
    assert caught.value.pointer == "/properties/v/uniqueItems"


def test_such_a_schema_is_kept_but_for_its_items_where_texts_are_judged() -> None:
    grammar = compiled(JsonSchema(HIDDEN), on_unsupported="check")
    assert [(issue.pointer, issue.keyword) for issue in grammar.warnings] == [
        ("/properties/v/uniqueItems", "uniqueItems")
    ]
    assert allows(grammar, '{"v":[[true],[true],[true],[true]]}')


def test_numbers_between_bounds_without_a_multiple_are_nothing_to_llguidance_too() -> None:
    """An empty text was accepted."""
    grammar = compiled({"minimum": 0.5, "maximum": 0.5, "multipleOf": 1}, strict=False, engine="llguidance")
    assert not grammar.matcher().accepting
    assert allows(grammar, "[]") and not allows(grammar, "0.5")


def test_a_name_that_can_only_be_one_that_is_there_is_not_begun_among_many() -> None:
    """A hundred other letters were allowed as well, and none of them was looked at."""
    short = [{"propertyNames": {"minLength": low, "maxLength": 1}} for low in (0, 1)]
    grammar = compiled({"type": "object", "minProperties": 2, "anyOf": short}, strict=False)
    matcher = grammar.matcher()
    assert matcher.advance(list(b'{"k":1,"')) == 8
    row = np.zeros(BYTES.num_words, np.int32)
    matcher.fill_mask(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    assert bits[ord("j")] and not bits[ord("k")]
    assert [matcher.fork().advance([ord(name)]) for name in "jk"] == [1, 0]
