"""The Lark text of a constraint: it has few words, and says what the graphs say."""

from __future__ import annotations

from typing import Any

import pytest

from graftlm.core.grammar import ast
from graftlm.core.grammar.compile import language_of
from graftlm.core.grammar.engines.lark import lark
from graftlm.core.grammar.engines.lark.optional_row import is_optional_row
from graftlm.core.grammar.engines.llguidance import LlguidanceGrammar
from graftlm.core.grammar.spec import JsonSchema, Options
from tests.core.grammar.vocabularies import byte_vocabulary

NAMES = ["id", "name", "a_longer_name", "tags", "e"]
VALUES: list[dict[str, Any]] = [
    {"type": "integer"},
    {"type": "array", "items": {"$ref": "#/$defs/tree"}},
    {"enum": ["x", "y"]},
    {"$ref": "#/$defs/tree"},
    {"type": "boolean"},
]


def of_members(num: int) -> JsonSchema:
    fields = dict(zip(NAMES[:num], VALUES, strict=False))
    tree = {"type": "object", "properties": {**fields, "below": {"$ref": "#/$defs/tree"}}}
    return JsonSchema({"$ref": "#/$defs/tree", "$defs": {"tree": tree}})


TREES = [f"{{{part}}}" for part in ("", '"id":1', '"tags":[{"e":true},{}]', '"name":[],"e":false', '"id":1,"below":{}')]
OTHERS = [
    '{"a":1}',
    '{"id":1,"a":{},"b":[]}',
    '{"below":{"a":1},"a":null,"a":2}',
    '{"a":1,"id":2}',
    '{"id":1,}',
    '{,"a":1}',
]


def accepted(text: str, document: str) -> bool:
    """Whether the grammar `text` allows the whole of `document`."""
    matcher = LlguidanceGrammar.from_lark(text, byte_vocabulary()).matcher()
    return matcher.advance(list(document.encode())) == len(document) and matcher.accepting


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("num", range(1, 6))
def test_a_row_of_optional_members_says_what_a_walk_says(
    num: int, strict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[bool] = []

    def seen(node: ast.Graph) -> bool:
        rows.append(is_optional_row(node))
        return rows[-1]

    language = language_of(of_members(num), Options(strict=strict), token_rules=True)
    monkeypatch.setattr(lark, "is_optional_row", seen)
    row = lark.to_lark(language.node, language.rules)
    assert any(rows)
    monkeypatch.setattr(lark, "is_optional_row", lambda node: False)
    walk = lark.to_lark(language.node, language.rules)
    documents = [*TREES, *OTHERS]
    assert [accepted(row, document) for document in documents] == [accepted(walk, document) for document in documents]
    assert accepted(row, OTHERS[0]) != strict


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("num", [4, 5, 16, 17, 21, 70])
def test_a_long_row_of_optional_members_has_rules_of_few_members(num: int, strict: bool) -> None:
    schema = {"type": "object", "properties": {f"m{i}": {"$ref": "#"} for i in range(num)}}
    language = language_of(JsonSchema(schema), Options(strict=strict), token_rules=True)
    text = lark.to_lark(language.node, language.rules)
    assert max(line.count('"\\"m') for line in text.splitlines()) <= 8
    for i in range(num):
        assert accepted(text, f'{{"m{i}":{{}}}}')
        assert accepted(text, f'{{"m{i}":{{}},"m{i}":{{}}}}') is False
    some = [f'"m{i}":{{}}' for i in range(0, num, 3)]
    for end in ("", ',"x":[1]', ',"x":1,"y":{},"x":2'):
        assert accepted(text, f"{{{','.join(some)}{end}}}") is (not strict or not end)
        assert not accepted(text, f"{{{','.join([some[-1], *some[:-1]])}{end}}}") if len(some) > 1 else True
    last = f"m{num - 1}"
    document = '{"m2":{"m0":{},"m1":{"m3":{}}},"' + last + '":{"' + last + '":{}}}'
    assert accepted(text, document) and not accepted(text, document[:-1] + ",}")
    assert accepted(text, "{}") and accepted(text, '{"x":1}') is not strict and not accepted(text, "{,}")


@pytest.mark.parametrize(("others", "num"), [("y", 1), ("yz", 2), ("wyz", 2)])
def test_a_row_is_written_where_it_is_met_and_has_a_rule_from_then_on(others: str, num: int) -> None:
    row = {"type": "object", "properties": {name: {"type": "integer"} for name in "abc"}}
    properties = {"x": {"$ref": "#"}} | {name: row | {"minProperties": 0, "title": name} for name in others}
    language = language_of(JsonSchema({"type": "object", "properties": properties}), Options(), token_rules=True)
    text = lark.to_lark(language.node, language.rules)
    assert text.count('"\\"a\\":"') == num
    for name in others:
        assert accepted(text, f'{{"x":{{"{name}":{{"b":1}}}},"{name}":{{"a":1,"c":2}}}}')
        assert accepted(text, f'{{"{name}":{{}}}}')
        assert not accepted(text, f'{{"{name}":{{,"b":1}}}}') and not accepted(text, f'{{"{name}":{{"c":1,"b":1}}}}')


def loop(first: str) -> ast.Graph:
    """`first`, then any number of `,x`."""
    return ast.Graph((((ast.literal(first), 1),), ((ast.literal(",x"), 1),)), frozenset({1}))


def test_states_that_lead_back_to_themselves_alike_have_one_rule() -> None:
    node = ast.alternation(*(ast.concat(ast.Rule("more"), loop(first)) for first in "abcd"))
    more = ast.alternation(ast.literal("z"), ast.concat(ast.literal("z"), ast.Rule("more")))
    text = lark.to_lark(node, {"more": more})
    assert text.count("|\n") == 2  # a word that is met again has a rule from then on
    assert [accepted(text, document) for document in ("zb,x,x", "zd,x,x", "zzd,x", "z,x")] == [True] * 3 + [False]


def test_what_one_state_skips_to_is_written_in_its_rule() -> None:
    a, b, c = map(ast.literal, "abc")
    graph = ast.Graph((((ast.EMPTY, 1), (a, 2)), ((b, 2), (c, 2)), ()), frozenset({2}))
    assert lark.to_lark(graph, {}) == 'start:s1\ns1:"b"|"c"|"a"\n'


def test_a_graph_that_is_met_again_is_written_once() -> None:
    graph = loop("a")
    rules = {"one": ast.concat(graph, ast.literal("!")), "two": ast.concat(graph, ast.literal("?"))}
    text = lark.to_lark(ast.alternation(ast.Rule("one"), ast.Rule("two")), rules)
    assert text.count('"a"') == text.count('",x"') == 1


def of_kinds(num: int) -> JsonSchema:
    """Objects of which each kind says something of some names, and all others may be anything."""
    kinds = [
        {
            "type": "object",
            "properties": {"kind": {"const": kind}, **{f"m{j}": {"type": "integer"} for j in range(i, num, 6)}},
        }
        for i, kind in enumerate("uvwxyz")
    ]
    return JsonSchema({"type": "object", "required": ["kind"], "oneOf": kinds})


KINDS = [
    ('{"kind":"u"}', True),
    ('{"kind":"u","m0":1,"m1":"a","m2":[]}', True),
    ('{"kind":"v","m1":1,"m0":{},"m29":null}', True),
    ('{"kind":"z","m5":3,"m0":{},"m1":[],"more":0}', True),
    ('{"kind":"u","m0":"a"}', False),
    ('{"kind":"v","m1":"a"}', False),
    ('{"kind":"z","m29":{}}', False),
    ('{"kind":"u","m2":1,"m1":1}', False),
    ('{"kind":"u",}', False),
]


def test_members_that_many_objects_leave_out_have_a_rule() -> None:
    language = language_of(of_kinds(30), Options(strict=False), token_rules=True)
    text = lark.to_lark(language.node, language.rules)
    options = [line for line in text.splitlines() if line.endswith("|") and line.count(" ") == 2]
    assert 30 <= len(options) <= 64
    for document, is_accepted in KINDS:
        assert accepted(text, document) == is_accepted, document


def test_a_member_is_left_out_by_its_rule_from_the_second_time_on() -> None:
    a, b = ast.literal("a"), ast.literal("b")

    def one_of(first: str, last: str) -> ast.Graph:
        ends = tuple((ast.literal(char), 4) for char in last)
        rows = (((ast.literal(first), 1),), ((ast.EMPTY, 2), (a, 2)), ((ast.EMPTY, 3), (b, 3)), ends, ())
        return ast.Graph(rows, frozenset({4}))

    node = ast.alternation(one_of("1", "xy"), one_of("2", "yz"), one_of("3", "xz"))
    lines = lark.to_lark(node, {}).splitlines()
    assert len([line for line in lines if line.endswith("|")]) == 2
    assert len([line for line in lines if line.count(" ") == 2 and "|" not in line]) == 2  # both left out, and the end
    documents = {"1y": True, "2by": True, "3abx": True, "2ax": False, "1bax": False, "3aax": False, "3aby": False}
    assert {document: accepted("\n".join(lines) + "\n", document) for document in documents} == documents
