"""Transcripts tokenised piece by piece, as whole."""

from __future__ import annotations

import random
from typing import Any

import pytest
from guidance.chat import ChatMLTemplate
from guidance.models._transformers import TransformersTokenizer

from graftlm.adapters.guidance.prompt import Known, PromptTokens, _last_boundary
from graftlm.core.text.tokenizer import Tokenizer
from tests.adapters.guidance.guidance_plugin import trained_tokenizer
from tests.models import byte_tokenizer

PIECES = (
    "the quick ",
    "fox",
    " jumps over",
    "\n\n",
    "it's 3.5 ",
    "na\u00efve \u4e2d\u6587",
    "<|im_end|>",
    '{"a b": ',
    "  x ",
    " yes no ",
)


def tokens_of(hf: Any) -> tuple[PromptTokens, TransformersTokenizer]:
    tokenizer = TransformersTokenizer(hf, ChatMLTemplate)
    return PromptTokens(tokenizer, Tokenizer.from_hf(hf)), tokenizer


def test_a_growing_text_has_the_ids_of_the_whole() -> None:
    prompts, tokenizer = tokens_of(trained_tokenizer())
    assert prompts.splits
    pick = random.Random(0)
    for _ in range(20):
        text, known = "", Known()
        for _ in range(30):
            text += pick.choice(PIECES)
            ids, known = prompts.encode(text, known)
            assert ids == tokenizer.encode(text.encode())
        assert known.ids and text.startswith(known.text)


def test_a_long_text_that_programs_share_is_tokenised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, tokenizer = tokens_of(trained_tokenizer())
    shared = " ".join(["the quick fox jumps"] * 200)
    known = prompts.settle(shared, Known())
    texts = [shared + " over", shared + " it's 3.5", shared[:-3] + "an another", shared[1:] + " yes"]
    expected = [tokenizer.encode(text.encode()) for text in texts]
    lengths: list[int] = []
    whole = prompts._whole

    def counted(text: str) -> list[int]:
        lengths.append(len(text))
        return whole(text)

    monkeypatch.setattr(prompts, "_whole", counted)
    assert prompts.settle(shared, Known()) is known and not lengths
    found = [prompts.encode(text, Known())[0] for text in texts]
    assert found == expected
    assert [length > 1000 for length in lengths].count(True) == 1  # of the text that begins in another way


def test_the_last_boundary_is_between_letters() -> None:
    for text, expected in (("ab cd ef", 5), ("ab cd  ef", 2), ("a 1 b", 0), (" a", 0), ("a b ", 1), ("\u00e9 a b", 3)):
        assert _last_boundary(text) == expected, text


def test_another_text_than_the_known_one_is_tokenised_anew() -> None:
    prompts, tokenizer = tokens_of(trained_tokenizer())
    _, known = prompts.encode("one two three four five", Known())
    assert prompts.encode("six seven eight", known)[0] == tokenizer.encode(b"six seven eight")


def test_a_vocabulary_with_tokens_across_words_is_never_split() -> None:
    hf = trained_tokenizer()
    hf.add_tokens(["of the"])
    prompts, tokenizer = tokens_of(hf)
    assert not prompts.splits
    text = "one of the many words of the text"
    ids, known = prompts.encode(text, Known())
    assert ids == tokenizer.encode(text.encode()) and known == Known()


@pytest.mark.parametrize("hf", [trained_tokenizer(), byte_tokenizer()], ids=["words", "bytes"])
def test_the_beginning_of_text_is_where_guidance_puts_it(hf: Any) -> None:
    prompts, tokenizer = tokens_of(hf)
    ids = tokenizer.encode(b"some words here")
    bos = tokenizer.bos_token_id
    expected = ids if bos is None else tokenizer.recode([bos, *ids])
    assert prompts.with_bos(ids) == list(expected)
    assert prompts.with_bos(list(expected)) == list(expected)
