"""Context-free constraints behind the same matcher."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from bench.grammar.validity import write
from graftlm.core.errors import GrammarError
from graftlm.core.grammar.compile import Grammar
from graftlm.core.grammar.engines import llguidance
from graftlm.core.grammar.engines.llguidance import LlguidanceGrammar
from graftlm.core.grammar.matcher import NO_ENDING, Matcher
from graftlm.core.grammar.nodes import nodes
from graftlm.core.grammar.spec import Composite, JsonSchema, Lark, Spec
from graftlm.core.grammar.vocabulary import Vocabulary
from tests import grammars
from tests.grammars import BYTES, allows, compact

LIST: dict[str, Any] = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer"},
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["value", "next"],
        }
    },
    "$ref": "#/$defs/node",
}


def compiled(spec: Spec | dict[str, Any] | bool, **options: Any) -> Grammar:
    return grammars.compiled(spec, **{"engine": "llguidance", **options})


def allowed(matcher: Matcher, vocabulary: Vocabulary = BYTES) -> set[int]:
    row = np.full(vocabulary.num_words, -1, np.int32)
    matcher.fill_mask(row)
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def text(matcher: Matcher, ids: list[int]) -> str:
    return BYTES.decode(ids).decode()


def test_a_lark_grammar_counts_its_brackets() -> None:
    grammar = compiled(Lark('start: "a" start "b" | "x"'))
    assert grammar.engine == "llguidance"
    assert allows(grammar, "aaxbb") and not allows(grammar, "aaxb")


def test_a_lark_grammar_that_cannot_be_read_is_an_error_with_its_reason() -> None:
    with pytest.raises(GrammarError, match="line 1, column 8: unknown name"):
        compiled(Lark("start: nothing"))


def test_the_end_is_allowed_exactly_where_the_text_is_complete() -> None:
    matcher = compiled(Lark('start: "a"+')).matcher()
    assert allowed(matcher) == {ord("a")} and not matcher.accepting
    assert matcher.advance([ord("a")]) == 1
    assert allowed(matcher) == {ord("a"), 256} and matcher.accepting
    assert matcher.advance([256]) == 1 and matcher.finished
    assert allowed(matcher) == set()


def test_every_end_of_sequence_id_ends() -> None:
    vocabulary = Vocabulary([*BYTES.tokens, b"", b""], eos_token_id=[256, 258])
    matcher = Grammar.compile(Lark('start: "a"'), vocabulary).matcher()
    assert matcher.advance([97]) == 1
    assert allowed(matcher, vocabulary) == {256, 258}
    assert matcher.advance([258]) == 1 and matcher.finished


def test_a_vocabulary_without_an_end_is_matched_all_the_same() -> None:
    vocabulary = Vocabulary([bytes([byte]) for byte in range(256)])
    matcher = Grammar.compile(Lark('start: "a"'), vocabulary).matcher()
    assert allowed(matcher, vocabulary) == {97}
    assert matcher.advance([97]) == 1 and allowed(matcher, vocabulary) == set()


def test_what_may_come_first_is_computed_once_for_all_texts_of_a_grammar() -> None:
    grammar = compiled({"type": "object", "properties": {"a": {}}})
    assert isinstance(grammar.compiled, LlguidanceGrammar)
    assert grammar.compiled.start_mask is not None  # compiling looks whether anything may come first
    one, other = grammar.matcher(), grammar.matcher()
    assert allowed(one) == {ord("{")}
    one.advance([ord("{")])
    assert allowed(one) == {ord('"'), ord("}")}
    assert allowed(other) == {ord("{")}
    one.rollback(1)
    assert allowed(one) == {ord("{")}


def test_tokens_that_do_not_fit_are_not_consumed_and_break_nothing() -> None:
    matcher = compiled(LIST).matcher()
    assert matcher.advance(list(b'{"value":x1')) == 9
    assert matcher.advance([5000, 1]) == 0 and matcher.advance([256]) == 0
    assert matcher.advance(list(b'1,"next":null}')) == 14 and matcher.accepting


def test_rollback_goes_back_over_the_end_as_well() -> None:
    matcher = compiled(LIST).matcher()
    whole = list(b'{"value":1,"next":null}')
    assert matcher.advance([*whole, 256]) == len(whole) + 1
    matcher.rollback(6)
    assert text(matcher, matcher.ending([])) == "null}"
    with pytest.raises(ValueError, match="cannot undo 99"):
        matcher.rollback(99)


def test_a_fork_goes_its_own_way() -> None:
    matcher = compiled(LIST).matcher()
    matcher.advance(list(b'{"value":'))
    twin = matcher.fork()
    assert twin.advance(list(b'7,"next":null}')) == 14
    assert twin.accepting and not matcher.accepting


def test_forced_text_is_told_as_bytes_and_as_tokens() -> None:
    matcher = compiled(LIST).matcher()
    assert matcher.forced_bytes() == b'{"value":'
    assert text(matcher, matcher.forced([])) == '{"value":'


@pytest.mark.parametrize(
    "start", ["", '{"value":12', '{"value":1,"next":{', '{"value":1,"next":{"value":-', '{"value":1,"next":n']
)
def test_an_ending_completes_the_text_from_anywhere(start: str) -> None:
    matcher = compiled(LIST).matcher()
    assert matcher.advance(list(start.encode())) == len(start)
    ending = matcher.ending([])
    assert len(ending) == matcher.min_tokens_to_accept() < 32
    assert matcher.advance(ending) == len(ending) and matcher.accepting
    json.loads(start + text(matcher, ending))


@pytest.mark.parametrize("start", ["", '{"a":"x}', '{"a":[1,{"b":"\\', '{"a":{"b":tr', '{"":-', '{"a":"é'])
def test_free_json_is_ended_from_inside_strings_numbers_and_words(start: str) -> None:
    matcher = compiled({"type": "object"}).matcher()
    assert matcher.advance(list(start.encode())) == len(start.encode())
    json.loads(start + text(matcher, matcher.ending([])))


HEAVY = {"^[a-z]{1,3000}-x": {"type": "string"}, "^x[a-z-]{1,3000}$": {"type": "string", "maxLength": 3}}


def test_a_text_that_is_too_much_for_the_lexer_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(llguidance._LARGE, "step_lexer_fuel", 100_000)
    grammar = compiled({"type": "object", "patternProperties": HEAVY, "additionalProperties": {"type": "integer"}})
    begun, ended, heavy, late = (grammar.matcher() for _ in range(4))
    for matcher, start in ((begun, '{"q'), (ended, '{"q":1}'), (heavy, '{"xa-'), (late, "{")):
        assert matcher.advance(list(start.encode())) == len(start)
    twin = begun.fork()
    with pytest.raises(GrammarError, match="gave up"):
        allowed(heavy)
    assert ord('"') in allowed(late) and late.advance(list(b'"q')) == 2
    for matcher in (begun, twin, late):
        assert ord('"') in allowed(matcher)
        assert matcher.advance(list(b'":')) == 2 and ord("1") in allowed(matcher) and ord("a") not in allowed(matcher)
        assert matcher.advance(list(b"1}")) == 2 and matcher.accepting
        matcher.rollback(3)
        assert ord(":") in allowed(matcher)
    assert ended.accepting and allowed(ended) == {256}
    fresh = grammar.matcher()
    assert fresh.advance(list(b'{"q":1}')) == 7 and fresh.accepting


def test_a_combination_of_formats_and_patterns_used_to_stop_at_its_first_character() -> None:
    name = {"type": "string", "pattern": "a{2,}", "format": "hostname", "not": {"pattern": "^(?=.*a)(?=.*b)"}}
    matcher = compiled(name).matcher()
    assert matcher.advance(list(b'"')) == 1 and {ord("a"), ord("x")} < allowed(matcher)
    assert matcher.advance(list(b'aa.c"')) == 5 and matcher.accepting


def test_where_no_ending_is_found_none_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llguidance, "_SEARCH_S", 0.1)
    matcher = compiled(Lark('start: "a" start | "b" start')).matcher()
    for _ in range(2):
        assert matcher.ending([]) == [] and matcher.min_tokens_to_accept() == NO_ENDING and not matcher.accepting
        assert matcher.advance([ord("a")]) == 1


def test_where_an_ending_is_lost_the_position_before_still_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llguidance, "_SEARCH_S", 0.1)
    matcher = compiled(Lark('start: "." | "~" rest\nrest: "a" rest | "b" rest')).matcher()
    assert text(matcher, matcher.ending([])) == "." and matcher.advance([ord("~")]) == 1
    assert matcher.min_tokens_to_accept() == NO_ENDING
    matcher.rollback(1)
    assert matcher.min_tokens_to_accept() == 1 and text(matcher, matcher.ending([])) == "."


def test_a_long_ending_is_found_and_shortened_by_the_tokens_of_it_that_are_written() -> None:
    names = [f"member{i:03}" for i in range(150)]
    schema = {"type": "object", "properties": {name: {"type": "integer"} for name in names}, "required": names}
    matcher = compiled(schema, engine="llguidance").matcher()
    whole = matcher.ending([])
    assert json.loads(text(matcher, whole)) == dict.fromkeys(names, 0)
    assert matcher.advance(whole[:40]) == 40 and matcher.ending([]) == whole[40:]
    assert matcher.advance(list(b"7")) in (0, 1) and matcher.advance(matcher.ending([])) and matcher.accepting


@pytest.mark.parametrize("pattern", ["^[0-9]+[a-z]$", "^[a-z]{3}(:[0-9]{2,}){2}/?$", "^(?=.*[A-Z]).{9,}$"])
def test_an_ending_of_a_string_is_found_by_the_characters_that_lead_to_its_end(pattern: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}, "required": ["a"]}
    matcher = compiled(schema, engine="llguidance").matcher()
    ending = matcher.ending([])
    json.loads(text(matcher, ending))
    assert matcher.advance(ending) == len(ending) and matcher.accepting


def test_alternatives_that_begin_alike_are_all_allowed() -> None:
    grammar = compiled({"type": "object", "dependentRequired": {"bar": ["foo"]}}, strict=False)
    assert grammar.engine == "llguidance"
    for value in ({}, {"foo": 1}, {"b": 1}, {"bar": 1, "foo": 2}):
        assert allows(grammar, compact(value)), value
    assert not allows(grammar, '{"bar":1}')


@pytest.mark.parametrize("whitespace", ["compact", "single", "flexible"])
def test_both_engines_read_a_closed_schema_alike(whitespace: str) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 3}, "b": {"enum": ["x", {"k": [1.5]}]}},
        "patternProperties": {"^p": {"type": "string", "pattern": "^q+$", "maxLength": 2}},
        "additionalProperties": {"type": "array", "items": {"multipleOf": 3, "type": "integer"}, "minItems": 1},
    }
    fsm, llg = (compiled(schema, engine=engine, whitespace=whitespace) for engine in ("fsm", "llguidance"))
    assert (fsm.engine, llg.engine) == ("fsm", "llguidance")
    values = [
        {},
        {"a": 3},
        {"a": 2},
        {"b": "x"},
        {"b": {"k": [1.5]}},
        {"p": "qq"},
        {"p": "qqq"},
        {"z": [3, 12]},
        {"z": []},
    ]
    separators = (",", ":") if whitespace == "compact" else (", ", ": ")
    for value in [*values, {"a": 4, "b": "x", "pp": "q", "z": [9]}, {"z": []}, {"z": [4]}, {"z": 1}]:
        written = json.dumps(value, separators=separators)
        assert allows(fsm, written) == allows(llg, written), written


def test_free_text_before_a_context_free_part_does_not_swallow_it() -> None:
    anything = nodes.star(nodes.ANY_CHAR)
    free = nodes.Difference(anything, nodes.concat(anything, nodes.literal("<call>"), anything))
    call = nodes.concat(nodes.literal("<call>"), nodes.Rule("nest"))
    rules = (
        (
            "nest",
            nodes.alternation(
                nodes.concat(nodes.literal("("), nodes.Rule("nest"), nodes.literal(")")), nodes.literal("x")
            ),
        ),
    )
    grammar = compiled(Composite(nodes.concat(free, nodes.optional(call)), rules))
    for good in ("", "hello", "hello <call>((x))", "<call>x", "a < b"):
        assert allows(grammar, good), good
    for bad in ("hello <call>", "<call>(x", "<call>x<call>x"):
        assert not allows(grammar, bad), bad


def test_schemas_share_one_grammar_when_they_are_put_together() -> None:
    from graftlm.core.grammar.schema.lowering import lower_schema
    from graftlm.core.grammar.spec import Options

    first, second = (lower_schema(JsonSchema(s), Options()) for s in (LIST, {"type": "object"}))
    rules = tuple({**first.rules, **second.rules}.items())
    grammar = compiled(Composite(nodes.concat(first.node, nodes.literal("\n"), second.node), rules))
    assert allows(grammar, '{"value":1,"next":null}\n{"a":[]}')


@pytest.mark.parametrize(
    "schema",
    [
        {
            "type": "object",
            "properties": {"a": {"pattern": "^[a-z]{3}-[0-9]{4}$"}},
            "required": ["a"],
            "additionalProperties": {},
        },
        {"type": "array", "contains": {"type": "integer"}},
    ],
)
def test_an_ending_is_found_where_a_string_or_an_item_of_one_kind_is_wanted(schema: dict[str, Any]) -> None:
    grammar, rng = compiled(schema, strict=False), np.random.default_rng(0)
    assert grammar.engine == "llguidance"
    for _ in range(2):
        least = grammar.matcher().min_tokens_to_accept()
        data, _ = write(grammar, BYTES, rng, least + int(rng.integers(0, 30)))
        assert least > 0 and json.loads(data)


@pytest.mark.parametrize(
    ("schema", "limit"),
    [
        (
            {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(25_000)}},
            "limit of a context-",
        ),
        ({"enum": list(range(100_000))}, "split the enum"),
        ({"enum": [{"a": i} for i in range(50_000)]}, "45,000 different names and values"),
    ],
    ids=["properties", "enum", "enum of objects"],
)
def test_a_schema_beyond_the_limits_of_llguidance_is_an_error_that_names_them(
    schema: dict[str, Any], limit: str
) -> None:
    with pytest.raises(GrammarError, match=limit):
        compiled(schema)
