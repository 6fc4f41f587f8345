"""The trie over the tokens of a vocabulary."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from graftlm.core.grammar.masks.trie import SortedTokens, Trie
from graftlm.core.grammar.vocabulary import Vocabulary
from tests.core.grammar.vocabularies import bpe_vocabulary

TOKENS = [b"a", b"ab", b"", b"abc", b"b", b"ab"]


def test_the_trie_is_laid_out_in_preorder() -> None:
    trie = Trie.build(SortedTokens.of(TOKENS))
    byte, depth, end, token = trie.nodes.T.tolist()
    assert bytes(byte) == b"abcb"
    assert depth == [1, 2, 3, 1]
    assert end == [3, 3, 3, 4]
    assert token == [0, 1, 3, 4]
    assert trie.twins.tolist() == [[1, 5]]
    assert trie.max_depth == 3


def test_the_longest_token_is_found_at_any_position() -> None:
    trie = Trie.build(SortedTokens.of(TOKENS))
    assert trie.longest_prefix(b"abcd") == 3
    assert trie.longest_prefix(b"xabx", 1) == 1
    assert trie.longest_prefix(b"c") is None
    assert trie.find(b"ab") == 1 and trie.find(b"ac") == -1


@settings(max_examples=100)
@given(st.binary(max_size=12) | st.text('abelmnt":,{ é', max_size=12).map(str.encode))
def test_the_first_text_that_a_longer_token_begins_with_is_found(data: bytes) -> None:
    for vocabulary in (bpe_vocabulary(), Vocabulary([token for token in TOKENS if token])):
        ends = [data[start:] for start in range(len(data))]
        begun = [any(len(t) > len(end) and t.startswith(end) for t in vocabulary.tokens) for end in ends]
        assert vocabulary.trie.first_begun(data) == (begun.index(True) if True in begun else None)


@pytest.mark.parametrize("tokens", [[], [b""], [b"a"]])
def test_small_vocabularies_have_tries_too(tokens: list[bytes]) -> None:
    trie = Trie.build(SortedTokens.of(tokens))
    assert len(trie.nodes) == sum(map(len, tokens))
