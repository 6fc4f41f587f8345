"""Forced tokens behind each token of a vocabulary: those that the text has when both are encoded together."""

from __future__ import annotations

import pytest

from graftlm.core.grammar.engines.fsm import FsmGrammar
from graftlm.core.grammar.masks.healing import encode_after, heal
from graftlm.core.grammar.regex.parser import parse
from tests.core.grammar.vocabularies import bpe_vocabulary


@pytest.mark.parametrize(
    "pattern",
    [
        '","kind":"(a|b)',
        ',"kind":{"of it":{"and so on":(a|b)',
        "100(a|b)",
        "name(,|;)",
        '":\\[[0-9]+\\]',
        " \n",
        "ü(a|b)",
    ],
)
def test_forced_tokens_are_those_of_the_token_before_and_the_forced_bytes_together(pattern: str) -> None:
    vocabulary = bpe_vocabulary()
    grammar = FsmGrammar.compile(parse(pattern), vocabulary)
    matcher = grammar.matcher()
    data, after = grammar.run(matcher.place)
    num_joined = 0
    for token_id in range(vocabulary.vocab_size):
        together = heal(vocabulary, grammar.dfa, after, encode_after(vocabulary, [token_id], data))
        assert matcher.forced([token_id]) == together
        num_joined += vocabulary.joins(token_id, data)
    assert 0 < num_joined <= vocabulary.vocab_size
    assert not pattern.startswith('"') or num_joined < vocabulary.vocab_size / 2
