"""The Lark grammar of a language: llguidance accepts with it what the language has."""

from __future__ import annotations

import json
from typing import Any

import pytest

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.compile import language_of
from graftlm.core.grammar.engines.lark_writer import _LarkWriter, to_lark
from graftlm.core.grammar.engines.llguidance import LlguidanceGrammar
from graftlm.core.grammar.nodes import nodes
from graftlm.core.grammar.regex.parser import parse
from graftlm.core.grammar.spec import JsonSchema, Options
from tests.core.grammar.vocabularies import byte_vocabulary


def accepted(text: str, document: str) -> bool:
    """Return True if the grammar `text` accepts the whole of `document`."""
    matcher = LlguidanceGrammar.from_lark(text, byte_vocabulary()).matcher()
    return matcher.advance(list(document.encode())) == len(document.encode()) and matcher.accepting


def written(schema: dict[str, Any], *, strict: bool = True) -> str:
    language = language_of(JsonSchema(schema), Options(strict=strict))
    return to_lark(language.node, language.rules)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("num", [1, 4, 17, 70])
def test_optional_members_come_in_order_and_at_most_once(num: int, strict: bool) -> None:
    text = written({"type": "object", "properties": {f"m{i}": {"$ref": "#"} for i in range(num)}}, strict=strict)
    for i in range(0, num, 7):
        assert accepted(text, f'{{"m{i}":{{}}}}')
        assert not accepted(text, f'{{"m{i}":{{}},"m{i}":{{}}}}')
    some = [f'"m{i}":{{}}' for i in range(0, num, 3)]
    for end in ("", ',"x":[1]', ',"x":1,"y":{},"x":2'):
        assert accepted(text, f"{{{','.join(some)}{end}}}") is (not strict or not end)
    assert accepted(text, "{}") and not accepted(text, "{,}")
    assert accepted(text, '{"x":1}') is not strict


def of_kinds(num: int) -> dict[str, Any]:
    """Objects of several kinds; each kind declares some names, and members of other names have any value."""
    kinds = [
        {
            "type": "object",
            "properties": {"kind": {"const": kind}, **{f"m{j}": {"type": "integer"} for j in range(i, num, 6)}},
        }
        for i, kind in enumerate("uvwxyz")
    ]
    return {"type": "object", "required": ["kind"], "oneOf": kinds}


@pytest.mark.parametrize(
    ("document", "is_accepted"),
    [
        ('{"kind":"u"}', True),
        ('{"kind":"u","m0":1,"m1":"a","m2":[]}', True),
        ('{"kind":"z","m5":3,"m0":{},"m1":[],"more":0}', True),
        ('{"kind":"u","m0":"a"}', False),
        ('{"kind":"z","m29":{}}', False),
        ('{"kind":"u",}', False),
    ],
)
def test_each_kind_of_object_keeps_its_own_members(document: str, is_accepted: bool) -> None:
    assert accepted(written(of_kinds(30), strict=False), document) == is_accepted


@pytest.mark.parametrize(
    ("items", "tokens"),
    [
        (['{"a":1}'], ["{", '"a":', "1", "}"]),
        (['{ "a" : [', "1 , 2] }"], ["{ ", '"a" : ', "[", "1", " , ", "2", "] ", "}"]),
        (['{"a,{\\"":"}"', "}"], ["{", '"a,{\\"":', '"}"', "}"]),
        (["Say: ", "yes"], ["Say: ", "yes"]),
        (["five o'clock, \"she said"], []),  # a string that does not end
        (["plain"], []),
    ],
)
def test_a_sequence_is_cut_into_the_tokens_of_json(items: list[str], tokens: list[str]) -> None:
    found = _LarkWriter({})._json_tokens([nodes.Literal(item.encode()) for item in items])
    assert found == [nodes.literal(token) for token in tokens]


@pytest.mark.parametrize("whitespace", ["compact", "single", "flexible"])
@pytest.mark.parametrize("bounded", [True, False])
def test_tokens_of_any_whitespace_are_read(whitespace: str, bounded: bool) -> None:
    schema = {
        "properties": {"a,b": {"enum": ["{", "}", 1, 2.5]}, "n": {"type": "number"}, "more": {"$ref": "#"}},
        "patternProperties": {"^x": {"type": "string", "pattern": "^[,:]*$"}},
        "additionalProperties": {"type": "array", "items": {"type": "boolean"}},
    }
    options = Options(whitespace=whitespace, bounded_numbers=bounded)  # type: ignore[arg-type]
    language = language_of(JsonSchema(schema), options)
    text = to_lark(language.node, language.rules)
    separators = (",", ":") if whitespace == "compact" else (", ", ": ")
    whole = {"a,b": 2.5, "n": -1.25, "more": {"n": 3, "xy": ",:"}, "z": [True, False], "y": []}
    for value in ({}, {"a,b": "{"}, whole):
        assert accepted(text, json.dumps(value, separators=separators)), value
    for bad in ({"a,b": "["}, {"xy": "z"}, {"z": [1]}, {"n": "1"}):
        assert not accepted(text, json.dumps(bad, separators=separators)), bad
    assert accepted(text, '{\n "n" : 1 ,\t"z": [ true\n] }') == (whitespace == "flexible")


def test_a_graph_over_rules_has_a_rule_for_each_state() -> None:
    nest = {"a": nodes.concat(nodes.literal("("), nodes.optional(nodes.Rule("a")), nodes.literal(")"))}
    graph = nodes.Graph((((nodes.Rule("a"), 1), (nodes.EMPTY, 2)), ((nodes.literal(","), 0),), ()), frozenset({1, 2}))
    text = to_lark(graph, nest)
    found = [accepted(text, document) for document in ("", "(())", "(),()", "(),", "(", "())")]
    assert found == [True, True, True, True, False, False]


def test_a_regular_part_that_matches_nothing_is_optional() -> None:
    text = to_lark(
        nodes.concat(nodes.Rule("r"), nodes.star(nodes.chars("x"))),
        {"r": nodes.concat(nodes.chars("([")), "s": nodes.EMPTY},
    )
    assert accepted(text, "(") and accepted(text, "[xx")


def test_characters_with_a_meaning_in_regexes_stand_for_themselves() -> None:
    node = nodes.concat(parse("[a-c]{2}"), nodes.Rule("inner"), nodes.literal('"/\\é'))
    text = to_lark(
        node, {"inner": nodes.graph([[(nodes.Rule("x"), 1)], [(nodes.literal(","), 0)]], [1]), "x": parse("[^a]")}
    )
    assert accepted(text, 'abx,]"/\\é') and not accepted(text, 'aba"/\\é')


def test_intersections_and_differences_are_kept() -> None:
    both = nodes.Intersection((parse("[ab]*"), parse("(..)*")))
    node = nodes.concat(both, nodes.Rule("end"), nodes.Difference(parse("[0-9]+"), parse("42")))
    text = to_lark(
        node, {"end": nodes.alternation(nodes.literal("."), nodes.concat(nodes.literal("."), nodes.Rule("end")))}
    )
    found = [accepted(text, document) for document in ("ab.1", "..7", "abab.421", "a.1", "ab.42")]
    assert found == [True, True, True, False, False]


def test_an_automaton_beyond_ascii_is_refused() -> None:
    wide = nodes.Automaton.of([[(0xC3, 0xC3, 1)], [(0xA9, 0xA9, 2)], []], [2])
    with pytest.raises(GrammarError, match="beyond ASCII"):
        to_lark(nodes.concat(wide, nodes.Rule("r")), {"r": nodes.literal("x")})


def test_an_automaton_without_a_source_has_a_rule_for_each_state() -> None:
    multiples = nodes.Automaton.of(
        [[(0x30 + d, 0x30 + d, (10 * r + d) % 13) for d in range(10)] for r in range(13)], [0]
    )
    text = to_lark(nodes.concat(nodes.literal("<"), multiples, nodes.literal(">")), {})
    assert [accepted(text, f"<{n}>") for n in (13, 169, 14, 1300)] == [True, True, False, True]


def test_an_automaton_of_too_many_states_is_refused_where_the_library_would_overflow_its_stack() -> None:
    rows = [[(0x61, 0x61, state + 1)] for state in range(1_001)] + [[]]
    with pytest.raises(GrammarError, match="1,002 states, the limit of a context-free grammar is 1,000"):
        to_lark(nodes.Automaton.of(rows, [1_001]), {})


def test_rules_that_nest_too_deep_are_refused_where_the_library_would_overflow_its_stack() -> None:
    rules: dict[str, nodes.Node] = {"r1200": nodes.literal("x")}
    for i in range(1_200):
        rules[f"r{i}"] = nodes.concat(nodes.literal("("), nodes.optional(nodes.Rule(f"r{i + 1}")), nodes.literal(")"))
    with pytest.raises(GrammarError, match="1,201 rules deep, the limit of a context-free grammar is 1,000"):
        to_lark(nodes.Rule("r0"), rules)


def test_a_rule_that_is_missing_is_named() -> None:
    with pytest.raises(GrammarError, match="there is no rule 'x'"):
        to_lark(nodes.Rule("x"), {"y": nodes.literal("y")})


def test_a_part_whose_shortest_string_is_too_long_is_refused() -> None:
    rules: dict[str, nodes.Node] = {"d0": nodes.literal("[]")}
    for i in range(1, 41):
        rules[f"d{i}"] = nodes.concat(
            nodes.literal("["), nodes.Rule(f"d{i - 1}"), nodes.Rule(f"d{i - 1}"), nodes.literal("]")
        )
    with pytest.raises(GrammarError, match="the limit of a context-free grammar is 131,072; lower minItems"):
        to_lark(nodes.optional(nodes.Rule("d40")), rules)
