from __future__ import annotations

from typing import Any

import pytest

from graftlm.core.chat.growing_text import GrowingText, align
from graftlm.core.errors import ConfigError
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


def with_modules(*names: str, before: str = "", after: str = "!") -> GrowingText:
    text = GrowingText()
    text.write(before)
    for name in names:
        text.write_module(name, name * 3)
    text.write(after)
    return text


def test_modules_are_tokenised_one_by_one_and_text_before_them_is_one() -> None:
    tokenizer = Tokenizer.from_hf(byte_tokenizer(add_bos=True))
    prompt = with_modules("ab", "c", before="x", after="yz").prompt_input(tokenizer)
    assert [ids.tolist() for ids in prompt.of_modules] == [[BOS, 120], [BOS, *b"ababab"], [BOS, *b"ccc"]]
    assert prompt.ids[sum(prompt.modules) :].tolist() == [*b"yz"]
    assert prompt.layout is not None
    assert [prompt.layout.position(i) for i in (13, 14)] == [7, 8]


def test_forks_of_a_text_with_modules_go_their_own_ways() -> None:
    text = with_modules("a", "b", after="")
    text.fix_all_but_last(TOKENIZER)
    one, other = text.copy(), text.copy()
    one.write("1")
    other.write_module("c", "c")
    other.write("2")
    assert one.prompt_input(TOKENIZER).modules == (3, 3)
    assert other.prompt_input(TOKENIZER).modules == (3, 3, 1)
    head = GrowingText()
    head.write("head ")
    head.fix_all_but_last(TOKENIZER)  # as a fork does
    head.write_module("a", "aa")
    head.write("?")
    assert [bytes(ids.tolist()) for ids in head.prompt_input(TOKENIZER).of_modules] == [b"head ", b"aa"]


def test_what_is_written_after_modules_keeps_its_ids() -> None:
    text = with_modules("a")
    assert len(text.prompt_input(TOKENIZER)) == 4
    text.write_generated(TOKENIZER, "é", [*"é".encode()])
    text.write("z")
    prompt = text.prompt_input(TOKENIZER)
    assert (prompt.modules, prompt.ids[3:].tolist()) == ((3,), [*"!éz".encode()])


def test_a_module_that_cannot_stand_where_it_is_written_is_named() -> None:
    with pytest.raises(ConfigError, match="text stands between modules 'a' and 'b'"):
        with_modules("a").write_module("b", "b")
    with pytest.raises(ConfigError, match="'a' stands in the prompt twice"):
        with_modules("a", "a")
    with pytest.raises(ConfigError, match="right after module 'a'"):
        with_modules("a", after="").prompt_input(TOKENIZER)
    text = GrowingText()
    text.write("x")
    text.tokens(TOKENIZER)
    text.write_generated(TOKENIZER, "y", [121])
    with pytest.raises(ConfigError, match="'b' stands after what the model wrote"):
        text.write_module("b", "b")
