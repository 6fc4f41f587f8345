"""No text dies whose items must differ: what leaves no way to end it is not in the mask."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from bench.grammar.validity import write
from graftlm import GrammarError
from graftlm.core.grammar.engines.distinct_endings import EndingSearch
from graftlm.core.grammar.spec import JsonSchema
from tests.grammars import BYTES, allows, compiled

UNIQUE: dict[str, Any] = {"type": "array", "uniqueItems": True}
LETTERS: dict[str, Any] = {"items": {"enum": ["a", "b", "c", "d", "e"]}, "minItems": 3}
NULLS: dict[str, Any] = {"type": "array", "items": {"type": "null"}, "minItems": 2, "maxItems": 4}
FLAGS: dict[str, Any] = {**UNIQUE, "items": {"type": "boolean"}}
ENDS_IN_B: dict[str, Any] = {"properties": {"k": {"type": "string", "pattern": "b$"}}, "required": ["k"]}
CLOSED: dict[str, Any] = {"type": "object", "additionalProperties": False}
WIDE: dict[str, Any] = {**CLOSED, "properties": {"a": {}, "b": {"type": "boolean"}}, "required": ["a", "b"]}
ONE_OR_TWO: dict[str, Any] = {**CLOSED, "properties": {"k": {"enum": [1, 2]}}, "required": ["k"]}
WHOLE: dict[str, Any] = {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 1}
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
    "objects with a member of many values before one of few": {**UNIQUE, "items": WIDE, "minItems": 3},
    "few objects or any arrays": {**UNIQUE, "items": {"anyOf": [ONE_OR_TWO, {"type": "array"}]}, "minItems": 4},
    "objects of numbers with several spellings": {
        **UNIQUE,
        "items": {**CLOSED, "properties": {"k": WHOLE}, "required": ["k"]},
        "minItems": 2,
    },
    "contained constants": {
        **UNIQUE,
        "items": {"type": "string", "maxLength": 1},
        "allOf": [{"contains": {"const": "a"}}, {"contains": {"enum": ["a", "b"]}}, {"contains": {"const": "c"}}],
        "maxItems": 3,
    },
    "one of two unique arrays": {
        "type": "object",
        "properties": {
            "v": {
                "oneOf": [
                    {**UNIQUE, "items": {"type": "integer"}, "minItems": 1},
                    {**UNIQUE, "minItems": 2, "maxItems": 2},
                ]
            }
        },
        "required": ["v"],
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


@pytest.mark.parametrize(
    ("items", "begun", "last"),
    [
        (WIDE, '[{"a":1,"b":true},{"a":1,"b":false},{"a":', b"1,"),
        (WIDE, '[{"a":1,"b":true},{"a":1.0,"b":', b"t"),
        (ONE_OR_TWO | {"type": ["object", "array"]}, '[{"k":1},{"k":2},', b"{"),
        ({**CLOSED, "properties": {"k": WHOLE}, "required": ["k"]}, '[{"k":0},{"k":1}', b","),
    ],
)
def test_an_object_that_can_only_become_one_that_is_there_is_not_gone_on_with(
    items: dict[str, Any], begun: str, last: bytes
) -> None:
    """Each of these texts was written, and then nothing was allowed."""
    matcher = compiled({**UNIQUE, "items": items}).matcher()
    assert matcher.advance(list(begun.encode())) == len(begun)
    assert matcher.advance(list(last)) < len(last)


def test_objects_that_strict_mode_leaves_too_few_of_are_refused() -> None:
    """It was taken, and no text of it ended."""
    flag = {"type": "object", "properties": {"k": {"type": "boolean"}}}
    with pytest.raises(GrammarError, match="no text is found that keeps uniqueItems"):
        compiled({**UNIQUE, "items": flag, "minItems": 4})


def test_an_ending_is_found_where_each_item_has_to_differ_inside() -> None:
    matcher = compiled(
        {**UNIQUE, "items": {**CLOSED, "properties": {"b": {}}, "required": ["b"]}, "minItems": 4}
    ).matcher()
    items = json.loads(bytes(matcher.ending([])))
    assert len({json.dumps(item) for item in items}) == len(items) == 4


def test_an_ending_is_known_still_after_a_step_is_taken_back() -> None:
    matcher = compiled(DYING["all unique arrays of two values"]).matcher()
    assert matcher.advance(matcher.ending([])[:4]) == 4
    ending = matcher.ending([])
    assert matcher.advance(ending[:2]) == 2
    matcher.rollback(2)
    assert matcher.ending([]) == ending


def test_only_what_is_inside_of_a_doubtful_array_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token of each place was."""
    schema = {"properties": {"v": {**UNIQUE, "items": FLAGS}, "w": {"type": "integer"}}}
    matcher = compiled(schema).matcher()
    searched: list[bytes] = []
    find = EndingSearch.find

    def spied(self: EndingSearch) -> list[int] | None:
        searched.append(text)
        return find(self)

    monkeypatch.setattr(EndingSearch, "find", spied)
    row = np.zeros(BYTES.num_words, np.int32)
    data = b'{"v":[[true],[],[true,false]],"w":12}'
    for end in range(len(data)):
        text = data[:end]
        matcher.fill_mask(row)
        assert matcher.advance([data[end]]) == 1
    inside = range(len(b'{"v":'), len(b'{"v":[[true],[],[true,false]]'))
    assert searched and {len(found) for found in searched} <= set(inside)
