"""The trie walk of a DFA: in machine code, in Python, and of the tokens that leave a class of characters."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.automata.dfa import Dfa
from graftlm.core.grammar.masks import trie_walk
from graftlm.core.grammar.masks.self_loops import self_loop
from graftlm.core.grammar.masks.trie_walk import allow_leaving, allow_tokens, first_continued
from graftlm.core.grammar.regex.parser import parse
from graftlm.core.grammar.spec import Limits
from tests.core.grammar.automata.test_dfa import COUNTED
from tests.core.grammar.masks.test_masks import NARROW, STRING, walk_at_random
from tests.core.grammar.regex.test_parser import PATTERNS
from tests.core.grammar.vocabularies import bpe_vocabulary, continued


@settings(max_examples=60)
@given(st.one_of(PATTERNS, COUNTED), st.lists(st.integers(0, 1000), max_size=5), st.text('abelmnt":,{ é', max_size=6))
def test_the_first_text_that_a_readable_token_goes_on_is_what_brute_force_finds(
    pattern: str, choices: list[int], text: str
) -> None:
    vocabulary = bpe_vocabulary()
    try:
        dfa = Dfa.compile(parse(pattern), Limits(states=5_000, seconds=2))
    except GrammarError:
        return
    for i, place in enumerate(walk_at_random(dfa, vocabulary, choices)):
        suffix = text.encode()[i % 3 :]
        expected = continued(dfa, vocabulary, suffix, place)
        assert first_continued(vocabulary.trie, suffix, dfa, place) == (-1 if expected is None else expected)


@pytest.mark.parametrize(
    "pattern", [STRING % "*", STRING % "{1,40}", r"(\d{1,3}\.){3}\d{1,3}", r"([a-z]{2,20},){9,30}"]
)
def test_the_walk_in_python_finds_the_same_tokens(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary, dfa = bpe_vocabulary(), Dfa.compile(parse(pattern))
    for place in walk_at_random(dfa, vocabulary, [7, 99, 3, 41, 500]):
        compiled, plain = (np.zeros(vocabulary.num_words, np.int32) for _ in range(2))
        allow_tokens(vocabulary.trie, dfa, place, compiled)
        with monkeypatch.context() as patch:
            patch.setattr(trie_walk._walk_all, "machine_code", None)
            allow_tokens(vocabulary.trie, dfa, place, plain)
        assert (compiled == plain).all()


@pytest.mark.parametrize("pattern", [STRING % "*", STRING % "{0,40}", STRING % "{2,6}", *NARROW])
def test_the_walk_in_python_finds_the_same_tokens_that_leave_a_class(
    pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocabulary, dfa = bpe_vocabulary(), Dfa.compile(parse(pattern))
    num_compared = 0
    for state in range(1, dfa.num_states):
        place = (state, *[0] * dfa.num_registers)
        loop = self_loop(dfa, state, vocabulary.trie.max_depth)
        if loop is not None and loop.exits is not None:
            leaving = vocabulary.slices.build(loop.chars).leaving(loop.exits)
            compiled, plain = (np.zeros(vocabulary.num_words, np.int32) for _ in range(2))
            allow_leaving(leaving, dfa, place, compiled)
            with monkeypatch.context() as patch:
                patch.setattr(trie_walk._walk_leaving, "machine_code", None)
                allow_leaving(leaving, dfa, place, plain)
            assert (compiled == plain).all()
            num_compared += 1
    assert num_compared
