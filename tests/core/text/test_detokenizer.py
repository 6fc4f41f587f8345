from __future__ import annotations

from hypothesis import given, strategies as st

from graftlm.core.text.tokenizer import Tokenizer
from tests.models import IM_END, byte_tokenizer
from tests.toy_tokenizers import sentencepiece_tokenizer, wordpiece_tokenizer

BYTES = Tokenizer.from_hf(byte_tokenizer(merges=[("t", "h"), ("th", "e"), ("Ġ", "the")]))
SENTENCEPIECE = Tokenizer.from_hf(sentencepiece_tokenizer())


def test_an_answer_keeps_its_leading_space_after_a_prompt() -> None:
    ids = SENTENCEPIECE.encode("hello")[1:]
    assert SENTENCEPIECE.decode(ids) == "hello"
    assert SENTENCEPIECE.detokenizer().push(ids) == " hello"


def test_a_character_is_shown_only_when_whole() -> None:
    detokenizer = BYTES.detokenizer()
    assert [detokenizer.push([byte]) for byte in "é😀".encode()] == ["", "é", "", "", "", "😀"]
    assert detokenizer.text == "é😀" and detokenizer.flush() == ""


def test_a_broken_character_is_shown_as_one_mark_at_the_end() -> None:
    detokenizer = BYTES.detokenizer()
    assert detokenizer.push([0xF0, 0x9F]) == ""
    assert detokenizer.flush() == "\ufffd"


def test_special_ids_and_ids_beyond_the_tokenizer_add_no_text() -> None:
    assert BYTES.detokenizer().push([97, IM_END, 100_000, 98]) == "ab"
    assert BYTES.decode([97, IM_END, 100_000, 98]) == "ab"


def test_a_tokenizer_whose_decoder_tidies_up_is_decoded_by_itself() -> None:
    tokenizer = Tokenizer.from_hf(wordpiece_tokenizer())
    assert not tokenizer.exact_bytes
    detokenizer = tokenizer.detokenizer()
    ids = tokenizer.encode("unable to go, able unable.")
    assert "".join(detokenizer.push([i]) for i in ids) + detokenizer.flush() == tokenizer.decode(ids)


@given(st.text(), st.integers(1, 5))
def test_pieces_join_to_the_decoded_text_and_never_split_a_character(text: str, step: int) -> None:
    ids = BYTES.encode_continuation(text)
    detokenizer = BYTES.detokenizer()
    pieces = [detokenizer.push(ids[i : i + step]) for i in range(0, len(ids), step)]
    assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in text
    assert "".join(pieces) + detokenizer.flush() == BYTES.decode(ids)


@given(st.lists(st.integers(0, 270), max_size=30))
def test_any_ids_give_the_same_text_at_once_and_one_by_one(ids: list[int]) -> None:
    one_by_one = BYTES.detokenizer()
    text = "".join(one_by_one.push([i]) for i in ids) + one_by_one.flush()
    assert text == BYTES.decode(ids) == one_by_one.text


@given(st.text("aehlo é\n中", min_size=1))
def test_sentencepiece_text_survives_a_continuation(text: str) -> None:
    detokenizer = SENTENCEPIECE.detokenizer()
    assert detokenizer.push(SENTENCEPIECE.encode_continuation(text)) + detokenizer.flush() == text


def test_a_character_that_the_prompt_began_belongs_to_the_answer() -> None:
    detokenizer = BYTES.detokenizer([97, 0xF0, 0x9F])
    assert detokenizer.push([0x98]) == ""
    assert detokenizer.push([0x80, 98]) == "😀b"
    assert BYTES.detokenizer([0xF0, 0x9F, 0x98, 0x80]).push([98]) == "b"


def test_a_text_that_is_cut_used_to_end_with_a_mark_that_the_model_never_wrote() -> None:
    detokenizer = BYTES.detokenizer()
    assert detokenizer.push([97, 0xF0, 0x9F]) == "a"
    assert detokenizer.flush(cut=True) == ""
    assert detokenizer.text == "a"
