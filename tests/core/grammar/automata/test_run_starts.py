"""Forced texts begin where a state with several ways leads to one with a single way."""

from __future__ import annotations

import pytest

from graftlm.core.grammar.automata.dfa import Dfa
from graftlm.core.grammar.automata.run_starts import run_starts
from graftlm.core.grammar.automata.stack.dpda_builder import build_dpda
from graftlm.core.grammar.regex.regex import parse
from tests.core.grammar.automata.stack.test_dpda import of_schema


def texts_of(automaton: object, starts: list[int]) -> set[bytes]:
    assert isinstance(automaton, Dfa)
    return {automaton.run((state, *automaton.start[1:]))[0] for state in starts}


def test_the_beginning_and_what_follows_a_choice_are_starts() -> None:
    dfa = Dfa.compile(parse("name:(ab|cd)=x"))
    # behind a or c, behind the value, and one or two bytes further on, where a token may end
    assert texts_of(dfa, run_starts(dfa)) == {b"name:", b"b=x", b"d=x", b"=x", b"x"}


def test_a_text_with_a_choice_everywhere_has_no_starts() -> None:
    assert run_starts(Dfa.compile(parse("[ab]*"))) == []


@pytest.mark.parametrize("counters", [True, False])
def test_starts_behind_counted_repeats_are_found(counters: bool) -> None:
    dfa = Dfa.compile(parse("[a-z]{2,40}-end"), counters=counters)
    assert b"end" in texts_of(dfa, run_starts(dfa))


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
    found = {dpda.run((state,))[0] for state in run_starts(dpda)}
    assert any(text.startswith(b'{"first":{"inside":') for text in found)
    assert any(text.startswith(b',"second":') for text in found)
