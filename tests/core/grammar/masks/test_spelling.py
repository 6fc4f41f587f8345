"""Vocabularies without a token for every byte never lead a text where no token fits."""

from __future__ import annotations

import random

import numpy as np
import pytest

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.automata.dfa import Dfa
from graftlm.core.grammar.engines.fsm import FsmGrammar
from graftlm.core.grammar.masks.spelling import is_complete, of_single_bytes
from graftlm.core.grammar.regex.parser import parse
from graftlm.core.grammar.vocabulary import Vocabulary
from tests.core.grammar.vocabularies import allowed, byte_vocabulary

WORDS = Vocabulary([b"ab", b"abc", b"c", b"cd", b"d!", b"e", b""], eos_token_id=6)


def grammar_of(pattern: str) -> FsmGrammar:
    return FsmGrammar.compile(parse(pattern), WORDS)


def test_a_vocabulary_with_all_bytes_is_complete() -> None:
    assert is_complete(Dfa.compile(parse("é{3}|.")), byte_vocabulary())
    assert not is_complete(Dfa.compile(parse("abc")), WORDS)


def test_a_token_after_which_none_fits_is_not_allowed() -> None:
    grammar = grammar_of("abcd!")  # ab + cd leaves "!", abc leaves "d!"
    row = np.zeros(1, np.int32)
    matcher = grammar.matcher()
    matcher.fill_mask(row)
    assert allowed(row) == {0, 1}
    assert matcher.advance([0]) == 1
    matcher.fill_mask(row)
    assert allowed(row) == {2}
    assert matcher.fork().advance([3]) == 0
    assert matcher.advance([2, 4, 6]) == 3


def test_a_constraint_that_no_tokens_spell_is_an_error() -> None:
    with pytest.raises(GrammarError, match=r"no tokens of the vocabulary \(7 tokens\) spell"):
        grammar_of("abcdx|a+")


def test_an_ending_is_spelled_with_the_tokens_there_are() -> None:
    matcher = grammar_of("ab(cd)?c{1,40}d!").matcher()
    assert matcher.min_tokens_to_accept() == 2
    ending = matcher.ending([])
    assert matcher.advance(ending) == 2 and matcher.accepting


def test_nothing_is_forced_that_cannot_be_spelled() -> None:
    matcher = grammar_of("abcde").matcher()  # ab + cd + e; the longest token first, abc, leaves "de"
    assert matcher.forced_bytes() == b"abcde"
    assert matcher.forced([]) == []


@pytest.mark.parametrize("pattern", ["(abc?d?!?e?)*", "(ab|c|cd|d!){3,12}", "[a-e!]{9,30}"])
def test_random_texts_reach_their_end(pattern: str) -> None:
    draw, row = random.Random(pattern), np.zeros(1, np.int32)
    grammar = grammar_of(pattern)
    for _ in range(20):
        matcher = grammar.matcher()
        for _ in range(8):
            matcher.fill_mask(row)
            token_id = draw.choice(sorted(allowed(row)))
            assert matcher.advance([token_id]) == 1
            if matcher.finished:
                break
        ending = matcher.ending([])
        assert len(ending) == matcher.min_tokens_to_accept()
        assert matcher.advance(ending) == len(ending) and matcher.accepting


MOST_BYTES = Vocabulary(
    [bytes([b]) for b in range(256) if chr(b) not in "xy"] + [b"xa", b"ax", b"xyc", b""], eos_token_id=257
)


@pytest.mark.parametrize(
    "pattern",
    ["(a|x){3,60}", "(?:(?:ax?|b|c);){2,40}x?a", "((?:x[yc]|c){2,30},){1,20}", "[axy]{0,50}b", "(x?a[a-c]*;){3,}"],
)
def test_where_single_bytes_end_every_state_counters_stay_and_texts_reach_their_end(pattern: str) -> None:
    grammar, draw = FsmGrammar.compile(parse(pattern), MOST_BYTES), random.Random(pattern)
    by_bytes = of_single_bytes(grammar.dfa, MOST_BYTES)
    assert by_bytes is not None and by_bytes is not grammar.dfa
    assert bool(grammar.dfa.loops) == bool(Dfa.compile(parse(pattern)).loops)
    row, seen = np.zeros(9, np.int32), set()
    for _ in range(20):
        matcher = grammar.matcher()
        for _ in range(draw.randrange(40)):
            matcher.fill_mask(row)
            token_id = draw.choice(sorted(allowed(row)))
            seen.add(token_id)
            assert matcher.advance([token_id]) == 1
            if matcher.finished:
                break
        ending = matcher.ending([])
        assert len(ending) <= matcher.min_tokens_to_accept()
        assert matcher.advance(ending) == len(ending) and matcher.accepting
    assert seen & {254, 255, 256}, "tokens with bytes that are no tokens are allowed too"


def test_where_single_bytes_do_not_end_a_state_its_tokens_are_searched() -> None:
    assert of_single_bytes(Dfa.compile(parse("a{2,60}x")), MOST_BYTES) is None
    grammar = FsmGrammar.compile(parse("a{2,60}xa"), MOST_BYTES)
    assert not grammar.dfa.loops and grammar.matcher().min_tokens_to_accept() == 3
