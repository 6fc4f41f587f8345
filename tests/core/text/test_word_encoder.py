"""Words of a text that are encoded one by one have the ids that the whole text has."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import AddedToken, Tokenizer as Core, models, pre_tokenizers

from graftlm.core.text.tokenizer import Tokenizer
from graftlm.core.text.word_encoder import WordEncoder, Words
from tests.tokenizer_kinds import KINDS, SPECIALS, tokenizer_kind

_PIECES = [
    '{"',
    '":',
    '","',
    "_",
    "name",
    "Name",
    "k100",
    "1234",
    "it's",
    "'s",
    "'S",
    "-",
    "0.5",
    "é",
    "\u4f60",
    "\0",
    "\x1d",
]
_PIECES += [" ", "  ", "\n", "\t", "\r\n", " \n ", "[", "]}", "\\n", "/", "<", "fox", "<mask>", "x<|im_", *SPECIALS]
TEXTS = st.lists(st.sampled_from(_PIECES), max_size=12).map("".join) | st.text(st.characters(max_codepoint=127))


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    return Tokenizer.from_hf(tokenizer_kind(kind))


@cache
def words_of(kind: str) -> Words | None:
    tokenizer = tokenizer_of(kind)
    return Words.of(tokenizer.continuation_backend or tokenizer.backend)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=80)
@given(texts=st.lists(TEXTS, max_size=4))
def test_ids_by_words_are_those_of_the_whole_text(kind: str, texts: list[str]) -> None:
    tokenizer = tokenizer_of(kind)
    encoder = WordEncoder(tokenizer)
    expected = [tokenizer.encode_continuation(text) for text in texts]
    assert [encoder(text) for text in texts] == expected
    assert [encoder(text) for text in texts] == expected  # now the words are kept


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=80)
@given(text=TEXTS)
def test_the_pre_tokenizer_takes_words_apart_as_it_does_the_whole_text(kind: str, text: str) -> None:
    core = tokenizer_of(kind).continuation_backend or tokenizer_of(kind).backend
    words = words_of(kind)
    if words is not None and text.isascii():
        parts = [part for word in words.pattern.findall(text) for part, _ in core.pre_tokenizer.pre_tokenize_str(word)]
        assert parts == [part for part, _ in core.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=80)
@given(left=TEXTS, right=TEXTS)
def test_texts_between_which_a_word_ends_have_the_ids_of_each(kind: str, left: str, right: str) -> None:
    tokenizer, words = tokenizer_of(kind), words_of(kind)
    if words is not None and words.ends(left, right):
        alone = [*tokenizer.encode_continuation(left), *tokenizer.encode_continuation(right)]
        assert tokenizer.encode_continuation(left + right) == alone


@pytest.mark.parametrize(
    ("left", "right", "ends"),
    [
        ("abc", '","', True),
        ("k1", '","', True),
        ('"', '","', False),
        (" ", "a", False),
        ("é", '"', False),
        ("a", "", False),
    ],
)
def test_a_word_ends_between_letters_and_signs(left: str, right: str, ends: bool) -> None:
    assert WordEncoder(Tokenizer.from_hf(tokenizer_kind("cl100k"))).ends_word(left, right) is ends


JSON = 'a","kind_100":"k1_'
BY_LETTERS = ["a", '","kind', "_", "100", '":"k', "1", "_"]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("cl100k", BY_LETTERS),
        ("qwen, composed characters", BY_LETTERS),
        ("gpt2", ["a", '","', "kind", "_", "100", '":"', "k", "1", "_"]),
        ("roberta, a space before the text", ["a", '","', "kind", "_", "100", '":"', "k", "1", "_"]),
        ("o200k, what is matched is kept", BY_LETTERS),
        ("deepseek", ["a", '","', "kind", "_", "100", '":"', "k", "1", "_"]),
    ],
)
def test_words_end_where_the_pre_tokenizer_always_ends_one(kind: str, words: list[str]) -> None:
    found = words_of(kind)
    assert found is not None and found.pattern.findall(JSON) == words


@pytest.mark.parametrize("kind", ["llama 2", "t5", "bert", "scripts apart", "bytes without words", "falcon"])
def test_no_words_are_known_of_other_tokenizers(kind: str) -> None:
    assert words_of(kind) is None


def test_a_text_that_may_hold_an_added_token_is_not_cut() -> None:
    core = Core(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.add_tokens([AddedToken('end"}')])
    found = Words.of(core)
    assert found is not None and found.firsts == {"e"}
    assert found.ends("a1", '":') and not found.ends("e1", '":') and not found.ends("a1", '":e')
