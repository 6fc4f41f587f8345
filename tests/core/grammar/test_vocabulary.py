"""Vocabularies: bytes of tokens, canonical ids of any bytes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from graftlm.core.errors import ConfigError
from graftlm.core.grammar.vocabulary import Vocabulary
from tests.core.grammar.vocabularies import allowed, bpe_tokenizer, bpe_vocabulary, byte_vocabulary
from tests.toy_tokenizers import sentencepiece_tokenizer


def test_end_of_sequence_has_no_bytes() -> None:
    vocabulary = Vocabulary([b"a", b"</s>"], eos_token_id=1)
    assert vocabulary.tokens == [b"a", b""]
    assert vocabulary.eos_token_ids == (1,)


def test_an_end_of_sequence_id_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(ConfigError, match="eos_token_id 7 is not in the vocabulary of 2 tokens"):
        Vocabulary([b"a", b"b"], eos_token_id=7)


def test_the_fingerprint_names_the_content() -> None:
    assert Vocabulary([b"a", b"b"]).fingerprint == Vocabulary([b"a", b"b"]).fingerprint
    others = [Vocabulary([b"ab", b""]), Vocabulary([b"b", b"a"]), Vocabulary([b"a", b"b"], eos_token_id=1)]
    assert len({v.fingerprint for v in others} | {Vocabulary([b"a", b"b"]).fingerprint}) == 4


@settings(max_examples=100)
@given(st.one_of(st.binary(max_size=12), st.text(max_size=12).map(str.encode), st.just('{"name":"é"}'.encode())))
def test_the_ids_of_any_bytes_spell_them(data: bytes) -> None:
    for vocabulary in (byte_vocabulary(), bpe_vocabulary()):
        assert vocabulary.decode(vocabulary.encode(data)) == data


def test_whole_text_gets_the_ids_that_the_tokenizer_gives() -> None:
    text = '{"name":"Ada Lovelace","größe":null}'
    assert bpe_vocabulary().encode(text.encode()) == bpe_tokenizer().encode(text, add_special_tokens=False)


def test_a_character_cut_in_two_is_spelled_by_the_longest_tokens() -> None:
    head = b'{"name":"'
    ids = bpe_vocabulary().encode(head + "é".encode()[:1])
    assert ids[:-1] == bpe_vocabulary().encode(head)
    assert bpe_vocabulary().tokens[ids[-1]] == b"\xc3"


def test_text_that_looks_like_a_special_token_is_spelled_out() -> None:
    vocabulary = bpe_vocabulary()
    ids = vocabulary.encode(b"a<eos>b")
    assert vocabulary.decode(ids) == b"a<eos>b"
    assert not set(ids) & set(vocabulary.eos_token_ids)


def test_sentencepiece_text_gets_no_space_in_front() -> None:
    vocabulary = Vocabulary.from_tokenizer(sentencepiece_tokenizer())
    assert vocabulary.decode(vocabulary.encode(b"hello")) == b"hello"


def test_bytes_without_a_token_are_an_error() -> None:
    with pytest.raises(ConfigError, match="no token of the vocabulary spells byte 0x63"):
        Vocabulary([b"a", b"b"]).encode(b"abc")


def test_the_encoder_is_asked_once_for_each_short_text_that_several_grammars_force() -> None:
    asked: list[str] = []

    def encode(text: str) -> list[int]:
        asked.append(text)
        return list(text.encode())

    vocabulary = Vocabulary([bytes([byte]) for byte in range(256)], encode=encode)
    vocabulary.encode(b'","').append(0)  # the caller's own list
    assert vocabulary.encode(b'","') == [34, 44, 34]
    assert vocabulary.encode(b'":"') == [34, 58, 34]
    assert asked == ['","', '":"']


@pytest.mark.parametrize("tokens", [[], [b"a", b'","', b"]", b"", b"[1,", b'"', b"]", b"x]"]])
@pytest.mark.parametrize("signs", [b'"', b'",]}', b"[", b"?"])
def test_tokens_that_hold_a_byte_are_found_once(tokens: list[bytes], signs: bytes) -> None:
    vocabulary = Vocabulary(tokens, eos_token_id=[2] if tokens else None, vocab_size=40)
    found = vocabulary.holding(signs)
    assert allowed(found) == {i for i, token in enumerate(vocabulary.tokens) if set(token) & set(signs)}
    assert found.shape == (vocabulary.num_words,) and vocabulary.holding(signs) is found
