from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from graftlm.core.errors import ConfigError, ModelError
from graftlm.core.messages import Message
from graftlm.core.tokenizer import Tokenizer
from tests.models import BOS, IM_END, byte_tokenizer
from tests.toy_tokenizers import metaspace_tokenizer, sentencepiece_tokenizer, wordpiece_tokenizer

BYTES = Tokenizer.from_hf(byte_tokenizer(merges=[("t", "h"), ("th", "e"), ("Ġ", "the")]))
SENTENCEPIECE = Tokenizer.from_hf(sentencepiece_tokenizer())


def test_text_gets_exactly_one_bos_where_the_tokenizer_puts_one() -> None:
    tokenizer = Tokenizer.from_hf(byte_tokenizer(add_bos=True))
    assert tokenizer.encode("a") == tokenizer.encode("<|bos|>a") == [BOS, 97]
    assert tokenizer.encode_continuation("a") == [97]
    assert BYTES.encode("a") == [97]


@pytest.mark.parametrize("tokenizer", [BYTES, SENTENCEPIECE], ids=["bytes", "sentencepiece"])
def test_counted_ids_are_those_of_the_text_on_its_own_whatever_was_cut_before(tokenizer: Tokenizer) -> None:
    text = "the other the<|im_end|>x"
    expected = tokenizer.hf.encode(text, add_special_tokens=False)
    assert tokenizer.count_ids(text) == expected
    tokenizer.hf("the other", truncation=True, max_length=1)  # Hugging Face leaves its tokenizer's core cutting
    assert tokenizer.count_ids(text) == expected


def test_messages_are_rendered_once_with_one_bos() -> None:
    tokenizer = Tokenizer.from_hf(byte_tokenizer(add_bos=True))
    ids = tokenizer.encode_prompt([{"role": "user", "content": "hi"}])
    assert ids.dtype == np.int32 and ids.tolist().count(BOS) == 1
    assert tokenizer.decode(ids, skip_special=False) == (
        "<|bos|><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_final_message_can_be_continued() -> None:
    text = BYTES.render([Message("user", "2+2?"), Message("assistant", "It is")], continue_final_message=True)
    assert text.endswith("assistant\nIt is")


def test_tools_reach_the_template() -> None:
    assert '"name": "add"' in BYTES.render([Message("user", "x")], tools=[{"name": "add"}])


@pytest.mark.parametrize("prompt", ["", [], np.zeros(0, dtype=np.int32)], ids=["text", "list", "array"])
def test_an_empty_prompt_is_refused(prompt: object) -> None:
    with pytest.raises(ConfigError, match="the prompt is empty"):
        BYTES.encode_prompt(prompt)


@pytest.mark.parametrize("prompt", [[1, -2], [1.5], 7, ["a"]], ids=["negative", "fraction", "number", "texts"])
def test_a_prompt_that_is_none_is_refused(prompt: object) -> None:
    with pytest.raises(ConfigError):
        BYTES.encode_prompt(prompt)


@pytest.mark.parametrize(
    "prompt",
    [[0, 105, 2**31 - 1], [1, True, 3], [1, np.int64(2), 3], (1, 2, 3), np.array([4, 5], np.uint16), [7]],
    ids=["integers", "a bool", "a number of numpy", "a tuple", "an array", "one"],
)
def test_token_ids_are_taken_as_they_are(prompt: Any) -> None:
    ids = BYTES.encode_prompt(prompt)
    assert (ids.dtype, ids.tolist()) == (np.int32, [int(i) for i in prompt])


@pytest.mark.parametrize("other", [None, 2.5, "iiii", b"iiii", [1], (1,), {}])
def test_a_list_that_begins_with_a_token_id_and_goes_on_with_something_else_is_refused(other: object) -> None:
    with pytest.raises((ConfigError, ValueError)):
        BYTES.encode_prompt([105, other, 105])


def test_messages_without_a_chat_template_are_refused() -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        SENTENCEPIECE.encode_prompt([{"role": "user", "content": "hi"}])


def test_what_a_template_refuses_names_the_roles() -> None:
    hf = byte_tokenizer()
    hf.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(ConfigError, match=r"roles: system.*no system role"):
        Tokenizer.from_hf(hf).encode_prompt([{"role": "system", "content": "hi"}])


def test_eos_ids_are_those_of_the_tokenizer_and_of_the_generation_config(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, IM_END]}))
    assert Tokenizer.from_pretrained(str(tmp_path)).eos_token_ids == (IM_END, 257)


def test_a_folder_without_a_tokenizer_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no tokenizer could be loaded"):
        Tokenizer.from_pretrained(str(tmp_path))


def test_the_byte_table_of_byte_level_bpe() -> None:
    assert BYTES.token_bytes[:256] == [bytes([byte]) for byte in range(256)]
    assert BYTES.token_bytes[IM_END] == b"" and BYTES.is_special(IM_END)
    assert BYTES.token_bytes[BYTES.encode(" the")[0]] == b" the"
    assert len(BYTES.token_bytes) == BYTES.vocab_size


def test_the_byte_table_of_sentencepiece_with_byte_fallback() -> None:
    ids = SENTENCEPIECE.encode_continuation(" hello\né")
    assert [SENTENCEPIECE.token_bytes[i] for i in ids] == [b" hello", b"\n", b"\xc3", b"\xa9"]


def test_an_added_token_that_is_not_special_is_its_own_text() -> None:
    hf = byte_tokenizer()
    hf.add_tokens(["<think>é"])
    tokenizer = Tokenizer.from_hf(hf)
    (token,) = tokenizer.encode("<think>é")
    assert tokenizer.token_bytes[token] == "<think>é".encode()
    assert tokenizer.detokenizer().push([token]) == "<think>é"


@pytest.mark.parametrize("make", [sentencepiece_tokenizer, metaspace_tokenizer], ids=["prepend", "metaspace"])
def test_a_continuation_gets_no_space_of_its_own(make: Callable[[], object]) -> None:
    tokenizer = Tokenizer.from_hf(make())
    assert tokenizer.token_bytes[tokenizer.encode("a")[-1]] == b" a"
    joined = tokenizer.encode("b") + tokenizer.encode_continuation("a") + tokenizer.encode_continuation(" a")
    assert tokenizer.decode(joined) == "ba a"


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


def test_fingerprints_differ_by_vocabulary_and_by_template() -> None:
    other = byte_tokenizer()
    other.chat_template = "x"
    prints = {Tokenizer.from_hf(hf).fingerprint for hf in (byte_tokenizer(), byte_tokenizer(), other)}
    assert len(prints) == 2 and BYTES.fingerprint not in prints


@settings(deadline=None)
@given(st.text(), st.integers(1, 5))
def test_pieces_join_to_the_decoded_text_and_never_split_a_character(text: str, step: int) -> None:
    ids = BYTES.encode_continuation(text)
    detokenizer = BYTES.detokenizer()
    pieces = [detokenizer.push(ids[i : i + step]) for i in range(0, len(ids), step)]
    assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in text
    assert "".join(pieces) + detokenizer.flush() == BYTES.decode(ids)


@settings(deadline=None)
@given(st.lists(st.integers(0, 270), max_size=30))
def test_any_ids_give_the_same_text_at_once_and_one_by_one(ids: list[int]) -> None:
    one_by_one = BYTES.detokenizer()
    text = "".join(one_by_one.push([i]) for i in ids) + one_by_one.flush()
    assert text == BYTES.decode(ids) == one_by_one.text


@settings(deadline=None)
@given(st.text("aehlo é\n中", min_size=1))
def test_sentencepiece_text_survives_a_continuation(text: str) -> None:
    detokenizer = SENTENCEPIECE.detokenizer()
    assert detokenizer.push(SENTENCEPIECE.encode_continuation(text)) + detokenizer.flush() == text


def test_a_token_of_part_of_a_character_has_no_text_of_its_own() -> None:
    assert BYTES.whole_text(97) == "a"
    assert BYTES.whole_text(0xC3) is None
    assert BYTES.whole_text(IM_END) is None
