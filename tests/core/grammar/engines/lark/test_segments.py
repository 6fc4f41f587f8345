"""Long walks in parts: they say what the walk says, and nest but a few deep."""

from __future__ import annotations

import json
import random
from itertools import product

import numpy as np
import pytest

from graftlm import Grammar, JsonSchema
from graftlm.core.grammar import ast
from graftlm.core.grammar.engines.lark import lark, segments
from graftlm.core.grammar.engines.lark.segments import depth
from graftlm.core.grammar.engines.llguidance import LlguidanceGrammar
from tests.core.grammar.vocabularies import byte_vocabulary

RECURSIVE = ast.Rule("end")  # so that the walk is no terminal
RULES = {"end": ast.alternation(ast.literal("."), ast.concat(ast.literal("!"), RECURSIVE))}


def random_walk(rng: random.Random, num_states: int) -> ast.Graph:
    """States that lead to a few later ones, by a mark, by a letter or by nothing; some lead back to themselves."""
    rows: list[tuple[tuple[ast.Node, int], ...]] = []
    mark = ast.literal(",")
    for state in range(num_states):
        later = range(state + 1, min(state + 4, num_states))
        row: list[tuple[ast.Node, int]] = [
            (rng.choice([mark, mark, ast.EMPTY, ast.literal("a"), ast.literal("b")]), target)
            for target in later
            if rng.random() < 0.6 or target == state + 1
        ]
        if rng.random() < 0.2:
            row.append((ast.literal("c"), state))
        if state > 1 and rng.random() < 0.1:
            row.append((ast.literal("d"), state - 1))
        rows.append(tuple(row))
    accepting = {num_states - 1} | {state for state in range(num_states) if rng.random() < 0.2}
    return ast.Graph(tuple(rows), frozenset(accepting))


def walked(graph: ast.Graph, data: bytes) -> bool:
    """Whether the walk writes `data`, each of whose bytes is an item."""

    def closed(states: set[int]) -> set[int]:
        work = list(states)
        while work:
            for item, target in graph.rows[work.pop()]:
                if item == ast.EMPTY and target not in states:
                    states.add(target)
                    work.append(target)
        return states

    states = closed({0})
    for byte in data:
        item = ast.literal(bytes([byte]))
        states = closed({target for state in states for way, target in graph.rows[state] if way == item})
    return not states.isdisjoint(graph.accepting)


def taken(text: str, documents: list[bytes]) -> list[bool]:
    start = LlguidanceGrammar.from_lark(text, byte_vocabulary())
    found = []
    for document in documents:
        matcher = start.matcher()
        found.append(matcher.advance(list(document)) == len(document) and matcher.accepting)
    return found


@pytest.mark.parametrize("seed", range(12))
def test_the_parts_of_a_walk_say_what_the_walk_says(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    walk = random_walk(rng, rng.choice([3, 9, 30]))
    texts = [bytes(data) for length in range(6) for data in product(b",abcd", repeat=length)]
    texts = texts[:400] + rng.sample(texts, 400)
    monkeypatch.setattr(lark, "MAX_STATES", 0)
    monkeypatch.setattr(lark, "MAX_DEPTH", 0)
    monkeypatch.setattr(segments, "_SHORTEST", rng.choice([1, 4, 12]))
    written = lark.to_lark(ast.concat(walk, RECURSIVE), RULES)
    assert taken(written, [text + b"." for text in texts]) == [walked(walk, text) for text in texts]


def test_a_state_that_is_only_passed_in_silence_has_no_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, c, d = map(ast.literal, "abcd")
    rows = (((a, 3), (ast.EMPTY, 1)), ((b, 3), (ast.EMPTY, 2)), ((c, 3), (d, 3)), ())
    monkeypatch.setattr(lark, "MAX_STATES", 0)
    monkeypatch.setattr(lark, "MAX_DEPTH", 0)
    text = lark.to_lark(ast.concat(ast.Graph(rows, frozenset({3})), RECURSIVE), RULES)
    assert '"a"|"b"|"c"|"d"\n' in text
    assert text.count('"c"') == text.count('"d"') == 1
    assert taken(text, [b"a.", b"d.", b".", b"ba."]) == [True, True, False, False]


def test_the_depth_of_a_walk_counts_a_loop_once() -> None:
    a, b = ast.literal("a"), ast.literal("b")
    assert depth(ast.Graph((((a, 1),), ((a, 0), (b, 2)), ()), frozenset({2}))) == 2


def test_an_object_with_a_thousand_members_and_a_condition_is_taken() -> None:
    names = [f"property{i}" for i in range(1_000)]
    schema = {
        "type": "object",
        "properties": {name: {"type": "integer"} for name in names},
        "anyOf": [{"required": [names[0]]}, {"required": [names[-1]]}],
    }
    grammar = Grammar.compile(JsonSchema(schema), byte_vocabulary(), engine="llguidance")

    def accepts(*written: int) -> bool:
        matcher, data = grammar.matcher(), json.dumps({names[i]: i for i in written}, separators=(",", ":")).encode()
        return matcher.advance(list(data)) == len(data) and matcher.accepting

    assert accepts(0) and accepts(0, 500, 700) and accepts(3, 4, 999)
    assert accepts(*range(0, 1_000, 9)) and accepts(*range(950, 1_000))
    assert not accepts() and not accepts(3, 4) and not accepts(500, 0)
    matcher = grammar.matcher()
    matcher.advance(list(b'{"property998":1'))
    row = np.zeros(9, np.int32)
    matcher.fill_mask(row)
    assert row[ord(",") >> 5] >> (ord(",") & 31) & 1
    assert not row[ord("}") >> 5] >> (ord("}") & 31) & 1
