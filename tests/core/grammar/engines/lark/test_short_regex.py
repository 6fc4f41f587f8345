"""Small automata as regular expressions: the same texts, and none that takes many parts."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from graftlm.core.grammar import ast
from graftlm.core.grammar.automata.products.product import is_empty
from graftlm.core.grammar.compile import language_of
from graftlm.core.grammar.engines.lark import lark
from graftlm.core.grammar.engines.lark.short_regex import MAX_ROWS, short_regex
from graftlm.core.grammar.schema.algebra.shapes import Number
from graftlm.core.grammar.schema.text.numbers import number
from graftlm.core.grammar.spec import JsonSchema, Options
from tests.core.grammar.engines.lark.test_lark import accepted


@pytest.mark.parametrize("integer", [True, False])
@pytest.mark.parametrize("step", ["2", "3", "5", "10", "25", "50", "0.5", "0.25", "0.05"])
def test_the_expression_has_the_texts_of_the_automaton(step: str, integer: bool) -> None:
    automaton = number(Number(integer=integer, multiple_of=(Decimal(step),)))
    if not isinstance(automaton, ast.Automaton):
        assert integer and "." in step  # then any integer is one
        return
    regex = short_regex(automaton)
    assert regex is not None
    assert is_empty(ast.Difference(automaton, regex)) and is_empty(ast.Difference(regex, automaton))


@pytest.mark.parametrize("step", ["7", "12", "60", "1000"])
def test_many_parts_have_no_expression(step: str) -> None:
    automaton = number(Number(integer=True, multiple_of=(Decimal(step),)))
    assert isinstance(automaton, ast.Automaton) and short_regex(automaton) is None


def test_states_from_which_no_text_ends_do_not_count() -> None:
    dead = tuple(((0x61 + i, 0x61 + i, 2 + i),) for i in range(20))
    automaton = ast.Automaton((((0x62, 0x62, 1), (0x63, 0x63, 2)), (), *dead, ()), frozenset({1}))
    assert short_regex(automaton) == ast.chars("b")
    assert short_regex(ast.Automaton(((),), frozenset())) == ast.NOTHING


def test_automata_beyond_ascii_and_large_ones_have_none() -> None:
    assert short_regex(ast.Automaton((((0xC3, 0xC3, 1),), ((0xA9, 0xA9, 2),), ()), frozenset({2}))) is None
    chain = tuple(((0x61, 0x61, i + 1),) for i in range(MAX_ROWS))
    assert short_regex(ast.Automaton((*chain, ()), frozenset({MAX_ROWS}))) is None


HALVES = {"type": "number", "multipleOf": 0.5}
SMALL = {"type": "integer", "minimum": 0, "maximum": 99}


@pytest.mark.parametrize(
    ("schema", "documents"),
    [
        ({"anyOf": [SMALL, HALVES]}, {"12": True, "12.5": True, "123.5": True, "12.3": False, "-0.5": True}),
        ({"oneOf": [SMALL, HALVES]}, {"12": False, "12.5": True, "123": True, "12.25": False}),
        ({"oneOf": [SMALL, {"type": "number", "minimum": -5, "maximum": 1000}]}, {"12.5": True, "12": False}),
        ({"type": "number", "multipleOf": 0.01, "minimum": 5}, {"5.25": True, "5.255": False, "4.99": False}),
    ],
)
def test_a_number_goes_on_beside_another_that_ends_sooner(schema: dict[str, Any], documents: dict[str, bool]) -> None:
    """llguidance's lexer takes the longest terminal, and a rule's first digit is shorter than an integer."""
    language = language_of(JsonSchema(schema), Options(strict=False), token_rules=True)
    text = lark.to_lark(language.node, language.rules)
    assert {document: accepted(text, document) for document in documents} == documents
