"""Prompts of each kind become PromptInputs; what is no prompt is an error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from graftlm.core.errors import ConfigError
from graftlm.core.prompt_input import PromptInput, Span
from graftlm.core.text.processor import TextProcessor
from graftlm.core.text.tokenizer import Tokenizer
from tests.models import BOS, byte_tokenizer
from tests.tokenizer_kinds import tokenizer_kind
from tests.toy_tokenizers import sentencepiece_tokenizer

BYTES = TextProcessor(Tokenizer.from_hf(byte_tokenizer(merges=[("t", "h"), ("th", "e"), ("Ġ", "the")])))
SENTENCEPIECE = TextProcessor(Tokenizer.from_hf(sentencepiece_tokenizer()))


def test_messages_are_rendered_once_with_one_bos() -> None:
    tokenizer = Tokenizer.from_hf(byte_tokenizer(add_bos=True))
    ids = TextProcessor(tokenizer).encode([{"role": "user", "content": "hi"}]).ids
    assert ids.dtype == np.int32 and ids.tolist().count(BOS) == 1
    assert tokenizer.decode(ids, skip_special=False) == (
        "<|bos|><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_messages_may_end_before_the_turn_of_the_model() -> None:
    encoded = BYTES.encode([{"role": "user", "content": "hi"}], add_generation_prompt=False)
    assert BYTES.tokenizer.decode(encoded.ids, skip_special=False) == "<|im_start|>user\nhi<|im_end|>\n"


@pytest.mark.parametrize("prompt", ["", [], np.zeros(0, dtype=np.int32)], ids=["text", "list", "array"])
def test_an_empty_prompt_is_refused(prompt: object) -> None:
    with pytest.raises(ConfigError, match="the prompt is empty"):
        BYTES.encode(prompt)


@pytest.mark.parametrize(
    "prompt",
    [[1, -2], [1.5], 7, ["a"], [1, 2**32 + 1], [1, 2**70]],
    ids=["negative", "fraction", "number", "texts", "wide", "wider"],
)
def test_a_prompt_that_is_none_is_refused(prompt: object) -> None:
    with pytest.raises(ConfigError):
        BYTES.encode(prompt)


@pytest.mark.parametrize(
    "prompt",
    [[0, 105, 2**31 - 1], [1, True, 3], [1, np.int64(2), 3], (1, 2, 3), np.array([4, 5], np.uint16), [7]],
    ids=["integers", "a bool", "a number of numpy", "a tuple", "an array", "one"],
)
def test_token_ids_are_taken_as_they_are(prompt: Any) -> None:
    ids = BYTES.encode(prompt).ids
    assert (ids.dtype, ids.tolist()) == (np.int32, [int(i) for i in prompt])


@pytest.mark.parametrize("other", [None, 2.5, "iiii", b"iiii", [1], (1,), {}])
def test_a_list_that_begins_with_a_token_id_and_goes_on_with_something_else_is_refused(other: object) -> None:
    with pytest.raises(ConfigError, match="list holds"):
        BYTES.encode([105, other, 105])


def test_messages_without_a_chat_template_are_refused() -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        SENTENCEPIECE.encode([{"role": "user", "content": "hi"}])


def test_what_a_template_refuses_names_the_roles() -> None:
    hf = byte_tokenizer()
    hf.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(ConfigError, match=r"roles: system.*no system role"):
        TextProcessor(Tokenizer.from_hf(hf)).encode([{"role": "system", "content": "hi"}])


def test_each_prompt_of_a_batch_has_its_own_error() -> None:
    processor = TextProcessor(Tokenizer.from_hf(tokenizer_kind("gpt2")))
    results = processor.encode_batch([("fine", None), ("", None), ("a\ud800b", None), ([1, 2], None), (3.5, None)])
    assert [type(r) is ConfigError for r in results] == [False, True, True, False, True]
    assert "lone surrogate" in str(results[2])


def test_a_prompt_that_is_rendered_already_stays_as_it_is() -> None:
    (encoded,) = BYTES.encode_batch([(BYTES.encode("the other"), None)])
    assert isinstance(encoded, PromptInput) and encoded.ids.tolist() == BYTES.encode("the other").ids.tolist()


def test_a_text_model_refuses_spans() -> None:
    span = Span(1, 3, b"sixteen bytes of", {})
    prompt = PromptInput(np.array([65, *span.ids, 66], np.int32), (span,))
    with pytest.raises(ConfigError, match="reads text only"):
        BYTES.encode(prompt)
