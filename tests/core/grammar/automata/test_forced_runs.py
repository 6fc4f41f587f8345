"""Forced texts begin where a state with several ways leads to one with a single way."""

from __future__ import annotations

import pytest

from graftlm.core.grammar.automata.dfa import Dfa
from graftlm.core.grammar.automata.forced_runs import forced_runs
from graftlm.core.grammar.automata.stack.dpda import Dpda
from graftlm.core.grammar.automata.stack.dpda_builder import build_dpda
from graftlm.core.grammar.regex.parser import parse
from tests.core.grammar.automata.stack.test_dpda import of_schema


def texts_of(automaton: Dfa | Dpda, max_runs: int = 100, max_bytes: int = 100) -> set[bytes]:
    """The texts that are found, each of which is what `run` finds."""
    found, none = forced_runs(automaton, max_runs, max_bytes), automaton.start[1:]
    assert [state for state, _, _ in found] == sorted({state for state, _, _ in found})
    for state, text, after in found:
        assert (text, after) == automaton.run((state, *none))
    return {text for _, text, _ in found}


def test_the_beginning_and_what_follows_a_choice_are_starts() -> None:
    dfa = Dfa.compile(parse("name:(ab|cd)=x"))
    # behind a or c, behind the value, and one or two bytes further on, where a token may end
    assert texts_of(dfa) == {b"name:", b"b=x", b"d=x", b"=x", b"x"}


def test_a_text_with_a_choice_everywhere_has_no_starts() -> None:
    assert forced_runs(Dfa.compile(parse("[ab]*")), 100, 100) == []


@pytest.mark.parametrize("counters", [True, False])
def test_starts_behind_counted_repeats_are_found(counters: bool) -> None:
    dfa = Dfa.compile(parse("[a-z]{2,40}-end"), counters=counters)
    assert b"end" in texts_of(dfa)


def test_starts_of_a_stack_automaton_are_those_without_a_stack() -> None:
    inner = {"type": "object", "properties": {"inside": {"type": "boolean"}}, "required": ["inside"]}
    tree = {
        "type": "object",
        "properties": {"first": {"$ref": "#/$defs/t"}, "second": {"type": "integer"}},
        "required": ["first", "second"],
        "additionalProperties": False,
        "$defs": {"t": {**inner, "properties": {**inner["properties"], "more": {"$ref": "#/$defs/t"}}}},
    }
    dpda = build_dpda(*of_schema(tree))
    found = texts_of(dpda)
    assert {b',"second":', b'"second":'} <= found
    assert not any(text.startswith(b'{"first":') for text in found)  # the place after it has a stack


def test_long_texts_and_those_beyond_the_limit_are_left_out() -> None:
    dfa = Dfa.compile(parse("a(b|c)" + "x" * 20 + "(d|e)yz"))
    assert texts_of(dfa, max_bytes=20) == {b"a", b"x" * 20, b"x" * 19, b"x" * 18, b"yz", b"z"}
    assert texts_of(dfa, max_bytes=19) == {b"a", b"x" * 19, b"x" * 18, b"yz", b"z"}
    assert texts_of(dfa, max_bytes=1) == {b"a", b"z"}
    assert texts_of(dfa, max_runs=1) == {b"a"}


def test_texts_that_end_a_count_lead_to_where_none_runs() -> None:
    dfa = Dfa.compile(parse('"[^"]{20,60}","k":(0|1)'))
    assert dfa.loops
    assert {b'"', b',"k":', b'"k":'} <= texts_of(dfa)
