"""Numbers of several alternatives are written in llguidance as one automaton keeps them, and can all end."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from graftlm.core.grammar import ast
from graftlm.core.grammar.compile import Grammar
from graftlm.core.grammar.engines.lark.overlaps import as_one
from graftlm.core.grammar.regex.parser import parse
from graftlm.core.grammar.spec import JsonSchema
from tests.grammars import BYTES, allows

NO_HALVES: dict[str, Any] = {"type": "number", "not": {"multipleOf": 0.5}}
CASES: list[list[dict[str, Any]]] = [
    [{"type": "number", "multipleOf": 10}, NO_HALVES],
    [{"multipleOf": 0.1, "type": "number"}, NO_HALVES, {"type": "null"}],
    [{"type": "integer", "minimum": 3, "maximum": 178}, {"type": "number", "multipleOf": 7}, {"enum": ["7", True]}],
    [{"type": "integer", "maximum": 99, "minimum": 0}, NO_HALVES, {"type": "string", "maxLength": 3}],
]
TEXTS = ["0", "7", "10", "14", "640", "12.5", "0.3", "3.25", "178", "179", "-7", "-0.1", "null", '"7"', "true", '"ab"']


@pytest.mark.parametrize("alternatives", CASES)
def test_llguidance_takes_what_an_automaton_takes(alternatives: list[dict[str, Any]]) -> None:
    spec = JsonSchema({"type": "array", "items": {"anyOf": alternatives}, "minItems": 1, "maxItems": 2})
    native = Grammar.compile(spec, BYTES)
    parsed = Grammar.compile(spec, BYTES, engine="llguidance")
    taken = [text for text in TEXTS if allows(native, f"[{text},{text}]")]
    assert 3 <= len(taken) < len(TEXTS)
    assert [text for text in TEXTS if allows(parsed, f"[{text},{text}]")] == taken


@pytest.mark.parametrize("alternatives", CASES)
def test_each_text_that_is_begun_can_end(alternatives: list[dict[str, Any]]) -> None:
    schema = {"type": "object", "properties": {"v": {"anyOf": alternatives}}, "required": ["v"]}
    grammar = Grammar.compile(JsonSchema(schema), BYTES, engine="llguidance", bounded_numbers=True)
    row, choices = np.zeros(BYTES.num_words, np.int32), random.Random(3)
    for length in range(6, 30):
        matcher = grammar.matcher()
        for _ in range(length):
            matcher.fill_mask(row)
            allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[:128])
            if not len(allowed):
                break
            assert matcher.advance([int(choices.choice(allowed))]) == 1
        ending = matcher.ending(())
        assert matcher.advance(ending) == len(ending) and matcher.accepting


def test_alternatives_stay_where_none_is_an_automaton_or_they_begin_otherwise() -> None:
    automaton = ast.Automaton((((0x30, 0x39, 1),), ((0x30, 0x39, 0),)), frozenset({1}))
    digits, word = parse("[0-9]{2}"), parse("[a-z]+")
    rules = {"digits": digits, "odd": automaton}

    def is_regular(node: ast.Node) -> bool:
        return not isinstance(node, ast.Automaton)

    assert as_one([ast.Rule("digits"), word], rules, is_regular) == [ast.Rule("digits"), word]
    assert as_one([ast.Rule("odd"), word], rules, is_regular) == [ast.Rule("odd"), word]
    others, found = as_one([ast.Rule("odd"), word, ast.Rule("digits")], rules, is_regular)
    assert others == word and isinstance(found, ast.Automaton)
