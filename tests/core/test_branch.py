from __future__ import annotations

from graftlm.core.branch import align
from graftlm.core.tokenizer import Tokenizer
from tests.models import IM_END, byte_tokenizer

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
