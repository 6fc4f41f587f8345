"""The trie walk of a pushdown automaton: in machine code and in Python."""

from __future__ import annotations

import numpy as np
import pytest

from graftlm.core.grammar.automata.stack.dpda import Dpda
from graftlm.core.grammar.automata.stack.dpda_builder import build_dpda
from graftlm.core.grammar.masks import stack_walk
from graftlm.core.grammar.masks.self_loops import self_loop
from graftlm.core.grammar.masks.stack_walk import allow_leaving, allow_tokens, first_continued
from tests.core.grammar.automata.stack.test_dpda import of_schema
from tests.core.grammar.masks.test_stack_masks import AUTOMATA, VOCABULARY, WORDS, readable
from tests.core.grammar.vocabularies import continued


@pytest.mark.parametrize("dpda", AUTOMATA)
def test_the_walk_in_python_finds_the_same(dpda: Dpda, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        place = dpda.start
        for _ in range(int(rng.integers(12))):
            tokens = [i for i in readable(dpda, place) if VOCABULARY.tokens[i]]
            if tokens:
                place = dpda.walk(place, VOCABULARY.tokens[int(rng.choice(tokens))]) or place
        rows = [np.zeros(VOCABULARY.num_words, np.int32) for _ in range(2)]
        _, depth = allow_tokens(VOCABULARY.trie, dpda, place, rows[0])
        with monkeypatch.context() as patch:
            patch.setattr(stack_walk._walk_all, "machine_code", None)
            _, other = allow_tokens(VOCABULARY.trie, dpda, place, rows[1])
        assert rows[0].tolist() == rows[1].tolist() and depth == other
        for suffix in (b"]", b'"]', b"a]}", b'"', b"\\"):
            after = dpda.walk(place, suffix)
            if after is not None:
                expected = continued(dpda, VOCABULARY, suffix, after)
                assert first_continued(VOCABULARY.trie, suffix, dpda, after) == (-1 if expected is None else expected)


@pytest.mark.parametrize("text", [b"", b"a", "é\u20ac".encode(), b"abcd", b"abcdefgh"])
def test_the_walk_in_python_finds_the_same_tokens_that_leave_a_class(
    text: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = {"type": "object", "properties": {"s": {"type": "string", "maxLength": 9}, "k": {"$ref": "#"}}}
    dpda = build_dpda(*of_schema(tree))
    place = dpda.walk(dpda.start, b'{"k":{"s":"' + text)
    assert place is not None
    loop = self_loop(dpda, place[0], WORDS.trie.max_depth)
    assert loop is not None and loop.exits is not None
    leaving = WORDS.slices.build(loop.chars).leaving(loop.exits)
    rows = [np.zeros(WORDS.num_words, np.int32) for _ in range(2)]
    _, depth = allow_leaving(leaving, dpda, place, rows[0])
    with monkeypatch.context() as patch:
        patch.setattr(stack_walk._walk_leaving, "machine_code", None)
        _, other = allow_leaving(leaving, dpda, place, rows[1])
    assert rows[0].tolist() == rows[1].tolist() and depth == other
