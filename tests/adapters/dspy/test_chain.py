"""Grammars one after the other as one matcher."""

from __future__ import annotations

import numpy as np
import pytest

from graftlm.adapters.dspy.chain import Chain, ChainMatcher
from graftlm.core.grammar import Grammar, Regex, Vocabulary

END = 256


def chain(*patterns: str) -> ChainMatcher:
    vocabulary = Vocabulary([bytes([i]) for i in range(256)] + [b""], eos_token_id=END)
    return Chain([Grammar.compile(Regex(pattern), vocabulary) for pattern in patterns], [END]).matcher()


def allowed(matcher: ChainMatcher) -> str:
    row = np.zeros(9, np.int32)
    assert matcher.fill_mask(row)
    bits = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
    return "".join("$" if i == END else chr(i) for i in bits)


def test_where_one_may_end_the_next_may_begin() -> None:
    matcher = chain("a+", "b", "c?")
    assert allowed(matcher) == "a"
    assert matcher.advance(b"a") == 1 and allowed(matcher) == "ab"
    assert matcher.advance(b"ab") == 2 and matcher.accepting and allowed(matcher) == "c$"


def test_a_token_that_no_link_takes_is_refused() -> None:
    matcher = chain("a", "b")
    assert matcher.advance(b"abc") == 2 and matcher.finished


def test_a_rollback_crosses_links() -> None:
    matcher = chain("a+", "b")
    matcher.advance(b"aab")
    matcher.rollback(2)
    assert allowed(matcher) == "ab" and not matcher.accepting
    with pytest.raises(ValueError, match="2 tokens"):
        matcher.rollback(2)


def test_a_fork_goes_its_own_way() -> None:
    matcher = chain("a+", "b")
    matcher.advance(b"a")
    twin = matcher.fork()
    assert twin.advance(b"b") == 1 and twin.finished and not matcher.finished


def test_the_ending_leads_through_all_links() -> None:
    matcher = chain("xy", "[0-9]{2}", "z")
    assert matcher.min_tokens_to_accept() == 5
    ending = matcher.ending([])
    assert len(ending) == 5 and matcher.advance(ending) == 5 and matcher.accepting


def test_forced_text_is_that_of_the_only_link_that_can_go_on() -> None:
    assert chain("ab", "c").forced_bytes() == b"ab"
    assert chain("a?", "b").forced_bytes() == b""
