from __future__ import annotations

from typing import Any

import pytest

from graftlm.core.chat.growing_text import GrowingText, align
from graftlm.core.text.batch_encoder import Block
from graftlm.core.text.tokenizer import Tokenizer
from tests.models import BOS, IM_END, byte_tokenizer
from tests.tokenizer_kinds import tokenizer_kind

TOKENIZER = Tokenizer.from_hf(byte_tokenizer(merges=[("a", "b"), ("ab", "c")]))
ABC = TOKENIZER.encode("abc")[0]


def test_generated_ids_are_kept_as_far_as_they_write_the_text() -> None:
    assert align(TOKENIZER, [120, ABC, 121], "xabcy") == ([120, ABC, 121], "")


def test_a_text_cut_inside_a_token_keeps_the_tokens_before() -> None:
    assert align(TOKENIZER, [120, ABC, 121], "xab") == ([120], "ab")


def test_the_end_of_turn_is_not_part_of_the_text() -> None:
    assert align(TOKENIZER, [120, IM_END], "x") == ([120], "")
    assert align(TOKENIZER, [120, IM_END, 121], "xy") == ([120, IM_END, 121], "")


def test_bytes_that_are_no_character_stay_as_they_were_generated() -> None:
    assert align(TOKENIZER, [*"é".encode(), 0xC3], "é\ufffd") == ([*"é".encode(), 0xC3], "")


def test_a_text_cut_after_a_broken_character_keeps_whole_characters() -> None:
    assert align(TOKENIZER, [*"é".encode(), 0xC3, 120, 121], "é\ufffdx") == ([*"é".encode()], "\ufffdx")


def test_given_texts_are_cut_into_tokens_together() -> None:
    text = GrowingText()
    text.write("a")
    text.write("bc")
    assert text.tokens(TOKENIZER).tolist() == [ABC]


def test_what_texts_begin_with_is_tokenised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer.from_hf(tokenizer_kind("cl100k"))
    encoder = tokenizer._batch_encoder
    encoded: list[Block] = []

    def counting(backend: Any, blocks: list[Block]) -> Any:
        encoded.extend(blocks)
        return encode_blocks(backend, blocks)

    encode_blocks = encoder._encode_blocks
    monkeypatch.setattr(encoder, "_encode_blocks", counting)
    shared = "the quick brown fox jumps over the lazy dog " * 100
    for i in range(8):
        text = GrowingText()
        text.write(shared)
        text.write(f"and then {i}")
        assert text.tokens(tokenizer).tolist() == tokenizer.encode_one(f"{shared}and then {i}")
    assert sum(len(block.text) for block in encoded) < 2 * len(shared)


def test_tokens_the_model_has_seen_stay() -> None:
    text = GrowingText()
    text.write("xa")
    assert text.tokens(TOKENIZER).tolist() == [120, 97]
    text.write_generated(TOKENIZER, "b", [98])
    text.write("c")
    assert text.tokens(TOKENIZER).tolist() == [120, 97, 98, 99]
    assert text.text == "xabc"


def test_the_last_given_token_may_join_what_follows_a_fork() -> None:
    text = GrowingText()
    text.write("xa")
    text.fix_all_but_last(TOKENIZER)
    other = text.copy()
    other.write("bc")
    assert other.tokens(TOKENIZER).tolist() == [120, ABC]
    assert text.tokens(TOKENIZER).tolist() == [120, 97]


def test_an_empty_text_has_no_tokens_but_bos() -> None:
    assert GrowingText().tokens(TOKENIZER).tolist() == []
    assert GrowingText().tokens(Tokenizer.from_hf(byte_tokenizer(add_bos=True))).tolist() == [BOS]


def test_ids_of_an_unfinished_character_stay_for_a_generation_and_go_for_constant_text() -> None:
    text = GrowingText()
    text.write("x")
    text.tokens(TOKENIZER)
    text.write_generated(TOKENIZER, "é", [*"é".encode(), 0xF0, 0x9F])
    assert text.tokens(TOKENIZER).tolist() == [120, *"é".encode(), 0xF0, 0x9F]
    other = text.copy()
    assert other.tokens(TOKENIZER, whole=True).tolist() == [120, *"é".encode()]
    other.write("y")
    assert other.tokens(TOKENIZER).tolist() == [120, *"é".encode(), 121]
    text.write_generated(TOKENIZER, "😀!", [0x98, 0x80, 33])
    assert text.text == "xé😀!"
    assert text.tokens(TOKENIZER).tolist() == [120, *"é😀!".encode()]


def test_a_token_of_a_whole_and_an_unfinished_character_is_tokenised_again() -> None:
    tokenizer = Tokenizer.from_hf(byte_tokenizer(merges=[("b", "Ã")]))  # b"b" and the first byte of "é"
    token = tokenizer.token_bytes.index(b"b\xc3")
    text = GrowingText()
    text.write("x")
    text.tokens(tokenizer)
    text.write_generated(tokenizer, "ab", [97, token])
    assert text.tokens(tokenizer).tolist() == [120, 97, token]
    text.write("c")
    assert text.tokens(tokenizer).tolist() == [120, 97, 98, 99]
