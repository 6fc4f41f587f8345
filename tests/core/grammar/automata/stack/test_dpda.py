"""A pushdown automaton reads what the rules say, at any depth, and refuses what one byte does not decide."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.automata import jit
from graftlm.core.grammar.automata.dfa import Place
from graftlm.core.grammar.automata.stack.dpda_builder import NotDeterministicError, build_dpda
from graftlm.core.grammar.compile import language_of
from graftlm.core.grammar.nodes import nodes
from graftlm.core.grammar.nodes.nodes import Node, Rule
from graftlm.core.grammar.regex.parser import parse
from graftlm.core.grammar.spec import JsonSchema, Limits, Options

LIST = {
    "list": nodes.concat(
        nodes.literal("["), nodes.separated(Rule("list"), nodes.literal(","), 0, None), nodes.literal("]")
    )
}
PAIR = {
    "value": nodes.alternation(parse("[0-9]+"), Rule("pair")),
    "pair": nodes.concat(nodes.literal("("), Rule("value"), nodes.literal(":"), Rule("value"), nodes.literal(")")),
}
TREE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "k": {"type": "array", "items": {"$ref": "#"}}, "x": {}},
    "required": ["v"],
}
ANY_OR_FIELDS = {"anyOf": [{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, TREE]}
SCHEMAS = [True, {"type": "object"}, TREE, ANY_OR_FIELDS, {"type": "array", "contains": {"const": 3}, "maxItems": 4}]


def of_schema(schema: dict[str, object] | bool, **options: object) -> tuple[Node, dict[str, Node]]:
    found = language_of(JsonSchema(schema), Options(strict=False, **options))  # type: ignore[arg-type]
    return found.node, found.rules


LANGUAGES: list[tuple[Node, dict[str, Node]]] = [
    (Rule("list"), LIST),
    (nodes.concat(Rule("pair"), nodes.literal(";"), Rule("list")), {**PAIR, **LIST}),
    *[of_schema(schema) for schema in SCHEMAS],
    of_schema(TREE, whitespace="flexible"),
    of_schema(ANY_OR_FIELDS, whitespace="single"),
]


@pytest.mark.parametrize(
    ("text", "is_right"),
    [("[]", True), ("[[],[[]]]", True), ("[[]", False), ("[]]", False), ("[,]", False), ("", False)],
)
def test_brackets_are_counted(text: str, is_right: bool) -> None:
    assert build_dpda(Rule("list"), LIST).matches(text.encode()) == is_right


@pytest.mark.parametrize("language", LANGUAGES)
def test_forced_bytes_lead_where_reading_them_leads(language: tuple[Node, dict[str, Node]]) -> None:
    dpda = build_dpda(*language)
    for text in (
        b"",
        b"(",
        b"(1",
        b"((1:2",
        b"[",
        b'{"',
        b'{"v":1',
        b'{"v":1,"k":[{"v',
        b'{"v":1,"x":t',
        b'{"v":1,"x":[n',
    ):
        place = dpda.walk(dpda.start, text)
        if place is not None:
            data, after = dpda.run(place)
            assert dpda.walk(place, data) == after
            for i, byte in enumerate(data):
                here = dpda.walk(place, data[:i])
                assert here is not None and not dpda.accepts(here)
                assert [b for b in range(256) if dpda.walk(here, bytes((b,)))] == [byte]
            assert len([b for b in range(256) if dpda.walk(after, bytes((b,)))]) != 1 or dpda.accepts(after)


@pytest.mark.parametrize("language", LANGUAGES)
def test_an_automaton_made_in_python_is_that_of_machine_code(
    language: tuple[Node, dict[str, Node]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = build_dpda(*language)
    for loop in jit._loops:
        monkeypatch.setattr(loop, "machine_code", None)
    plain = build_dpda(*language)
    assert (plain.table == made.table).all() and (plain.calls == made.calls).all()
    assert (plain.classes == made.classes).all() and (plain.accepting == made.accepting).all()
    assert (plain.distance == made.distance).all()


def test_ten_thousand_brackets_are_no_recursion() -> None:
    dpda = build_dpda(Rule("list"), LIST)
    place = dpda.walk(dpda.start, b"[" * 10_000)
    assert place is not None and dpda.ending_bound(place) == 10_000
    assert dpda.ending(place) == b"]" * 10_000


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(LANGUAGES), st.lists(st.integers(0, 10_000), max_size=40))
def test_each_ending_and_forced_string_is_one_of_the_language(
    language: tuple[Node, dict[str, Node]], choices: list[int]
) -> None:
    dpda = build_dpda(*language)
    place = dpda.start
    for choice in choices:
        readable = [byte for byte in range(256) if dpda.walk(place, bytes([byte])) is not None]
        assert dpda.ending_bound(place) == len(dpda.ending(place))
        assert dpda.is_final(place) == (not readable)
        after = dpda.walk(place, dpda.ending(place))
        assert after is not None and dpda.accepts(after)
        nearest = [dpda.walk(place, bytes([byte])) for byte in readable]
        shorter = min((dpda.ending_bound(step) + 1 for step in nearest if step is not None), default=0)
        assert dpda.accepts(place) or dpda.ending_bound(place) == shorter
        forced, end = dpda.run(place)
        assert bool(forced) == (len(readable) == 1 and not dpda.accepts(place))
        assert dpda.walk(place, forced) == end
        if not readable:
            break
        step = dpda.walk(place, bytes([readable[choice % len(readable)]]))
        assert step is not None
        place = step


def test_rules_that_begin_alike_are_written_out_once() -> None:
    other = {"other": nodes.concat(nodes.literal("["), nodes.optional(Rule("other")), nodes.literal("!]"))}
    dpda = build_dpda(nodes.alternation(nodes.concat(Rule("list"), nodes.literal("x")), nodes.literal("[y")), LIST)
    assert [text for text in (b"[]x", b"[[]]x", b"[y", b"[]", b"[[y") if dpda.matches(text)] == [
        b"[]x",
        b"[[]]x",
        b"[y",
    ]
    with pytest.raises(NotDeterministicError, match="one byte does not tell"):  # "[[[" may be of either, ever deeper
        build_dpda(nodes.alternation(Rule("list"), Rule("other")), {**LIST, **other})


def test_objects_of_any_kind_beside_others_are_refused() -> None:
    numbers = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}}
    with pytest.raises(NotDeterministicError):  # of {"a":[ the list may be of either
        build_dpda(*of_schema({"anyOf": [{"type": "object"}, numbers]}))
    words = {"type": "object", "properties": {"a": {"enum": ["b", "c"]}}, "additionalProperties": False}
    assert build_dpda(*of_schema({"anyOf": [{"type": "array"}, words]})).matches(b'{"a":"b"}')


def test_a_rule_that_may_end_where_it_may_go_on_is_not_deterministic() -> None:
    rules = {"a": nodes.concat(nodes.literal("a"), nodes.optional(Rule("a")))}
    with pytest.raises(NotDeterministicError):
        build_dpda(nodes.concat(Rule("a"), nodes.literal("a")), rules)


def test_a_rule_that_is_named_often_is_written_once() -> None:
    long = {"long": parse("[a-z]{3}x[0-9]{3}y[a-z]{3}z[0-9]{4}-[a-z]{3}x[0-9]{3}y[a-z]{3}z[0-9]{4}")}
    twice = nodes.concat(Rule("long"), nodes.literal(","), Rule("long"))
    often = nodes.concat(twice, nodes.literal(";"), twice, nodes.literal(";"), twice)
    assert build_dpda(often, long).num_states < build_dpda(twice, long).num_states + 20
    assert build_dpda(twice, long).matches(b",".join([b"abcx123yabcz1234-abcx123yabcz1234"] * 2))


def test_a_text_that_never_ends_and_one_that_is_too_long_are_refused() -> None:
    with pytest.raises(GrammarError, match="no text"):
        build_dpda(Rule("a"), {"a": nodes.concat(nodes.literal("a"), Rule("a"))})
    doubled = {f"d{i}": nodes.concat(Rule(f"d{i + 1}"), Rule(f"d{i + 1}")) for i in range(22)}
    doubled["d22"] = parse("[ab]" * 40 + "c{40}")
    with pytest.raises(GrammarError, match=r"the shortest text has [\d,]+ bytes, the limit is 1,048,576"):
        build_dpda(Rule("d0"), doubled)


def test_what_takes_too_many_places_is_refused_before_it_is_written_out() -> None:
    rules = {
        "x": nodes.repeat(
            nodes.concat(nodes.literal("(" * 50), nodes.optional(Rule("x")), nodes.literal(")")), 1, 5_000
        )
    }
    with pytest.raises(GrammarError, match=r"takes about [\d,]+ places, the limit is 1,000 states; make"):
        build_dpda(Rule("x"), rules, Limits(states=1_000))


def test_a_rule_that_is_not_given_is_named() -> None:
    with pytest.raises(GrammarError, match=r"there is no rule 'b'.*given: list"):
        build_dpda(Rule("b"), LIST)


def test_places_with_one_stack_are_equal() -> None:
    dpda = build_dpda(Rule("list"), LIST)
    places: list[Place | None] = [dpda.walk(dpda.start, text) for text in (b"[[", b"[[],[", b"[[[]],[")]
    assert places[1] == places[2] and places[0] is not None and len(places[0]) == len(places[1] or ())
