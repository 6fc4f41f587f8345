"""Context-free constraints behind the same matcher."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from bench.grammar.validity import write
from graftlm.core.errors import GrammarError
from graftlm.core.grammar import ast
from graftlm.core.grammar.automata.stack import positions
from graftlm.core.grammar.compile import Grammar
from graftlm.core.grammar.engines import llguidance
from graftlm.core.grammar.engines.lark.lark import to_lark
from graftlm.core.grammar.engines.llguidance import LlguidanceGrammar
from graftlm.core.grammar.matcher import Matcher
from graftlm.core.grammar.regex.parser import parse
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


LONG = {"type": "string", "pattern": r"id:\d{12}/app-[a-z0-9]{16}/run-[a-z0-9]{16}", "maxLength": 900}


def test_a_long_pattern_somewhere_in_a_long_text_is_ended_from_anywhere() -> None:
    matcher = compiled(LONG).matcher()
    for begun, num_missing in (('"', 58), ("ab id:1234", 51), (" id:", 55)):
        assert matcher.advance(list(begun.encode())) == len(begun)
        assert len(matcher.ending([])) == matcher.min_tokens_to_accept() == num_missing
    assert matcher.advance(matcher.ending([])) == 55 and matcher.accepting


def test_texts_do_not_use_up_the_states_of_a_combination(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(positions, "MAX_STATES", 1_500)
    grammar = compiled(LONG)
    for i in range(20):
        matcher = grammar.matcher()
        begun = f'"{i}' + "id:1" * i
        assert matcher.advance(list(begun.encode())) == len(begun)
        assert matcher.min_tokens_to_accept() == (54 if i else 58)
        assert matcher.advance(matcher.ending([])) > 50 and matcher.accepting


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


def test_an_empty_language_is_told_before_the_first_token() -> None:
    steps = {"allOf": [{"multipleOf": 4}, {"multipleOf": 6}]}
    grammar = compiled({"type": "integer", "minimum": 13, "maximum": 23, **steps}).compiled
    assert isinstance(grammar, LlguidanceGrammar)
    with pytest.raises(GrammarError, match="no text matches it"):
        grammar.prepare_endings()


def test_where_no_ending_is_found_none_is_claimed() -> None:
    matcher = compiled(Lark('start: /[#}]{300}/ "!" start | "."\n%ignore / +/')).matcher()
    matcher.advance([ord("#")])
    assert matcher.ending([]) == [] and matcher.min_tokens_to_accept() == 0 and not matcher.accepting


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
    anything = ast.star(ast.ANY_CHAR)
    free = ast.Difference(anything, ast.concat(anything, ast.literal("<call>"), anything))
    call = ast.concat(ast.literal("<call>"), ast.Rule("nest"))
    rules = (
        ("nest", ast.alternation(ast.concat(ast.literal("("), ast.Rule("nest"), ast.literal(")")), ast.literal("x"))),
    )
    grammar = compiled(Composite(ast.concat(free, ast.optional(call)), rules))
    for good in ("", "hello", "hello <call>((x))", "<call>x", "a < b"):
        assert allows(grammar, good), good
    for bad in ("hello <call>", "<call>(x", "<call>x<call>x"):
        assert not allows(grammar, bad), bad


def test_lark_text_holds_what_terminals_cannot_confuse() -> None:
    node = ast.concat(parse("[a-c]{2}"), ast.Rule("inner"), ast.literal('"/\\'))
    text = to_lark(node, {"inner": ast.graph([[(ast.literal("x"), 1)], [(ast.literal(","), 0)]], [1])})
    grammar = LlguidanceGrammar.from_lark(text, BYTES)
    matcher = grammar.matcher()
    assert matcher.advance(list(b'abx,x"/\\')) == 8 and matcher.accepting


def test_lark_text_writes_a_literal_where_it_is_met_and_names_what_comes_again() -> None:
    words = ast.concat(ast.Rule("a"), ast.Rule("b"), *[ast.Rule("a")] * 3)
    assert to_lark(words, {"a": ast.literal('"'), "b": ast.literal("é")}) == (
        'start:"\\"""\\u00e9""\\"""\\""s1\n'  # llguidance takes a symbol for each terminal that a rule holds
        's1:"\\""\n'
    )


def test_lark_text_joins_a_place_that_leads_on_to_the_one_before() -> None:
    walk = ast.Graph(
        (((ast.Rule("a"), 1),), ((ast.Rule("b"), 2),), ((ast.Rule("a"), 2), (ast.EMPTY, 3)), ()), frozenset({3})
    )
    text = to_lark(walk, {"a": ast.graph([[(ast.Rule("b"), 1)], []], [1]), "b": ast.literal("x")})
    assert text.splitlines()[2:4] == ["s1:r0 s1|", 's2:r0"x"s1']


NEST = {
    "a": ast.concat(ast.literal("("), ast.optional(ast.Rule("a")), ast.literal(")")),
    "b": ast.concat(ast.literal("["), ast.optional(ast.Rule("b")), ast.literal("]")),
}


def test_lark_text_has_one_rule_for_places_of_two_walks_that_go_on_alike() -> None:
    tail = ((ast.Rule("a"), 2), (ast.EMPTY, 2))
    walks = [ast.Graph((((ast.literal(name), 1),), tail, ()), frozenset({2})) for name in "xy"]
    text = to_lark(ast.concat(*walks), NEST)
    assert text.splitlines()[-3:] == ["s1:r0|", 's2:"x"s1', 's3:"y"s1']


def test_lark_text_has_one_rule_for_rules_that_say_the_same() -> None:
    pair = ast.concat(ast.Rule("a"), ast.Rule("b"))
    rules = {**NEST, "c": pair, "d": pair, "e": ast.Rule("d"), "f": ast.concat(*map(ast.Rule, "cde"))}
    assert to_lark(ast.Rule("f"), rules).splitlines()[3:] == ["r2:r0 r1", "r5:r2 r2 r2"]


def test_lark_text_names_a_choice_that_comes_again() -> None:
    node = ast.concat(*[ast.Rule("a"), ast.alternation(ast.Rule("a"), ast.Rule("b"))] * 3)
    assert to_lark(node, NEST).splitlines() == [
        "start:r0(r0|r1)r0 s1 r0 s1",
        'r0:"()"|"("r0")"',
        'r1:"[]"|"["r1"]"',
        "s1:r0|r1",
    ]


def test_lark_text_of_walks_in_walks_has_each_of_them_once() -> None:
    node: ast.Node = ast.Rule("x")
    for _ in range(12):  # the place of each inner walk is met from two sides, as that of a member is
        inner = ast.concat(ast.Rule("x"), node, ast.Rule("x"))
        node = ast.Graph((((ast.EMPTY, 1), (ast.Rule("x"), 1)), ((inner, 2),), ()), frozenset({2}))
    assert to_lark(node, {"x": ast.literal("x")}).count("\n") < 40


def test_an_automaton_beyond_ascii_inside_rules_is_refused() -> None:
    wide = ast.Automaton((((0xC3, 0xC3, 1),), ((0xA9, 0xA9, 2),), ()), frozenset({2}))
    with pytest.raises(GrammarError, match="beyond ASCII"):
        to_lark(ast.concat(wide, ast.Rule("r")), {"r": ast.literal("x")})


def test_schemas_share_one_grammar_when_they_are_put_together() -> None:
    from graftlm.core.grammar.schema.lowering import lower_schema
    from graftlm.core.grammar.spec import Options

    first, second = (lower_schema(JsonSchema(s), Options()) for s in (LIST, {"type": "object"}))
    rules = tuple({**first.rules, **second.rules}.items())
    grammar = compiled(Composite(ast.concat(first.node, ast.literal("\n"), second.node), rules))
    assert allows(grammar, '{"value":1,"next":null}\n{"a":[]}')


@pytest.mark.parametrize(
    "schema",
    [
        {
            "type": "object",
            "properties": {"a": {"pattern": "rocket_font"}},
            "required": ["a"],
            "additionalProperties": {},
        },
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


def test_an_automaton_of_too_many_states_is_refused_where_the_library_would_overflow_its_stack() -> None:
    rows = tuple(((0x61, 0x61, state + 1),) for state in range(1_001)) + ((),)
    with pytest.raises(GrammarError, match="1,002 states, the limit of a context-free grammar is 1,000"):
        to_lark(ast.Automaton(rows, frozenset({1_001})), {})


def test_an_ending_too_long_to_be_written_is_still_measured() -> None:
    pair = {"type": "object", "required": ["l", "r"]}
    definitions: dict[str, Any] = {"d0": {"type": "array", "items": {"$ref": "#"}}}
    for i in range(1, 41):
        inner = {"$ref": f"#/$defs/d{i - 1}"}
        definitions[f"d{i}"] = {**pair, "properties": {"l": inner, "r": inner}}
    matcher = compiled(JsonSchema({"$ref": "#/$defs/d40", "$defs": definitions})).matcher()
    assert matcher.min_tokens_to_accept() > 2**40


def test_a_minimum_beyond_all_budgets_is_still_measured() -> None:
    matcher = compiled(JsonSchema({"type": "string", "minLength": 10**7})).matcher()
    assert matcher.min_tokens_to_accept() > 10**7


@pytest.mark.parametrize(
    ("schema", "limit"),
    [
        ({"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(25_000)}}, "65,525 symbols"),
        (
            {"type": "object", "properties": {f"p{i}": {"properties": {"a": True}} for i in range(25_000)}},
            "65,525 symbols",
        ),
        ({"enum": list(range(100_000))}, "split the enum"),
        ({"enum": [{"a": i} for i in range(50_000)]}, "45,000 different names and values"),
    ],
    ids=["properties", "nested properties", "enum", "enum of objects"],
)
def test_a_schema_beyond_the_limits_of_llguidance_is_an_error_that_names_them(
    schema: dict[str, Any], limit: str
) -> None:
    with pytest.raises(GrammarError, match=limit):
        compiled(schema)
