"""Matchers: advance, roll back, fork, finish, end early."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.automata.dfa import Dfa
from graftlm.core.grammar.engines.automaton import AutomatonMatcher
from graftlm.core.grammar.engines.fsm import FsmGrammar
from graftlm.core.grammar.regex.parser import parse
from graftlm.core.grammar.spec import Limits
from graftlm.core.grammar.vocabulary import Vocabulary
from tests.core.grammar.automata.test_dfa import COUNTED
from tests.core.grammar.vocabularies import allowed, bpe_vocabulary, byte_vocabulary


def matcher_of(pattern: str, vocabulary: Vocabulary | None = None) -> AutomatonMatcher:
    return FsmGrammar(Dfa.compile(parse(pattern)), vocabulary or byte_vocabulary()).matcher()


def mask(matcher: AutomatonMatcher, vocabulary: Vocabulary) -> set[int]:
    row = np.zeros(vocabulary.num_words, np.int32)
    assert matcher.fill_mask(row)
    return allowed(row)


def test_advance_says_how_many_tokens_were_accepted() -> None:
    matcher = matcher_of("abc")
    assert matcher.advance(b"abx") == 2
    assert matcher.advance(b"c") == 1
    assert matcher.accepting


@pytest.mark.parametrize("token_id", [-1, 257, 10_000, 256])
def test_a_token_that_does_not_exist_or_ends_too_early_is_not_accepted(token_id: int) -> None:
    assert matcher_of("abc").advance([token_id]) == 0


def test_end_of_sequence_finishes_a_complete_text() -> None:
    matcher = matcher_of("ab*")
    assert matcher.advance([*b"abb", 256, *b"b"]) == 4
    assert matcher.finished
    assert mask(matcher, byte_vocabulary()) == set()
    matcher.rollback(1)
    assert not matcher.finished and matcher.advance(b"b") == 1


def test_a_text_that_nothing_can_follow_is_finished() -> None:
    matcher = matcher_of("ab|abc")
    matcher.advance(b"ab")
    assert matcher.accepting and not matcher.finished
    matcher.advance(b"c")
    assert matcher.accepting and matcher.finished
    assert mask(matcher, byte_vocabulary()) == {256}


def test_more_than_was_consumed_cannot_be_undone() -> None:
    matcher = matcher_of("abc")
    matcher.advance(b"ab")
    with pytest.raises(ValueError, match="2 were consumed"):
        matcher.rollback(3)


def test_forced_bytes_stop_where_the_text_has_a_choice() -> None:
    matcher = matcher_of('{"a":[0-9]+}')
    assert matcher.forced_bytes() == b'{"a":'
    matcher.advance(b'{"a":')
    assert matcher.forced_bytes() == b""


@settings(max_examples=40)
@given(COUNTED, st.lists(st.integers(0, 1000), max_size=8), st.integers(0, 8))
def test_rolling_back_and_forking_restore_every_answer(pattern: str, choices: list[int], undo: int) -> None:
    vocabulary = bpe_vocabulary()
    try:
        dfa = Dfa.compile(parse(pattern), Limits(states=5_000, seconds=2))
    except GrammarError:
        return
    matcher = FsmGrammar(dfa, vocabulary).matcher()
    trail = [matcher.fork()]
    for choice in choices:
        tokens = sorted(mask(matcher, vocabulary))
        if matcher.finished:
            break
        assert matcher.advance([tokens[choice % len(tokens)]]) == 1
        trail.append(matcher.fork())
    undo = min(undo, len(trail) - 1)
    matcher.rollback(undo)
    before = trail[len(trail) - 1 - undo]
    assert mask(matcher, vocabulary) == mask(before, vocabulary)
    assert (matcher.accepting, matcher.finished, matcher.place) == (before.accepting, before.finished, before.place)
    assert matcher.forced_bytes() == before.forced_bytes()
    for later in trail:  # forks were not moved
        later.rollback(trail.index(later))
        assert mask(later, vocabulary) == mask(trail[0], vocabulary)


@settings(max_examples=60)
@given(COUNTED, st.lists(st.integers(0, 1000), max_size=8))
def test_the_ending_is_accepted_and_no_longer_than_promised(pattern: str, choices: list[int]) -> None:
    vocabulary = bpe_vocabulary()
    try:
        dfa = Dfa.compile(parse(pattern), Limits(states=5_000, seconds=2))
    except GrammarError:
        return
    matcher, context = FsmGrammar(dfa, vocabulary).matcher(), [5]
    for choice in choices:
        tokens = sorted(mask(matcher, vocabulary) - set(vocabulary.eos_token_ids))
        if not tokens:
            break
        context.append(tokens[choice % len(tokens)])
        matcher.advance(context[-1:])
    ending = matcher.ending(context)
    assert len(ending) <= matcher.min_tokens_to_accept() <= matcher.ending_bound()
    assert matcher.advance(ending) == len(ending)
    assert matcher.accepting and matcher.min_tokens_to_accept() == 0


def test_an_ending_leaves_an_open_string_at_once() -> None:
    vocabulary = byte_vocabulary()
    matcher = matcher_of(r'\{"text":"[^"]{5,}","n":-?(0|[1-9]\d*)\}')
    matcher.advance(b'{"text":"abc')
    ending = bytes(matcher.ending([]))
    assert ending[2:] == b'","n":0}' and len(ending) == matcher.min_tokens_to_accept()
    assert matcher.advance([*ending, *vocabulary.eos_token_ids]) == len(ending) + 1
