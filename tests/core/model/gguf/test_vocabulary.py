"""Tokenizers of GGUF files: SentencePiece vocabularies, rules for words, and the tokens that end an answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Core
from tokenizers.models import BPE
from transformers.tokenization_utils_base import generate_merges

from graftlm.core.model.description import resolve
from graftlm.core.model.gguf.vocabulary import merges_of
from graftlm.core.text.tokenizer import Tokenizer
from tests.gguf_files import metadata_of, tensors_of, write_gguf
from tests.models import VOCAB_SIZE, tiny_model

WORDS = ["▁the", "▁th", "▁t", "he", "th", "▁a", "▁an", "an", "and", "▁and", "nd", "▁▁"]
PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *"abcdehnt", *WORDS, "<end_of_turn>"]
TYPES = [2, 3, 3, *[6] * 256, *[1] * 9, *[1] * len(WORDS), 3]
SCORES = [0.0] * 259 + [-1000.0] * 9 + [-float(i) for i in range(len(WORDS))] + [0.0]


def tokenizer_of(tmp_path: Path, architecture: str = "llama", **changed: Any) -> Tokenizer:
    tied = architecture == "gemma"
    model = tiny_model(architecture, tie_word_embeddings=tied, vocab_size=max(VOCAB_SIZE, len(PIECES)))
    metadata = metadata_of(model, architecture) | {f"tokenizer.ggml.{key}": value for key, value in changed.items()}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    path = write_gguf(tmp_path / f"{len(list(tmp_path.iterdir()))}.gguf", metadata, tensors_of(model, architecture))
    return Tokenizer.from_pretrained(resolve(path))


PIECEWISE = {
    "model": "llama", "pre": None, "tokens": PIECES, "token_type": TYPES, "scores": SCORES, "bos_token_id": 1,
    "eos_token_id": 2, "unknown_token_id": 0, "add_bos_token": None, "eot_token_id": None,
}  # fmt: skip


def test_a_sentencepiece_vocabulary_merges_by_score_and_falls_back_to_bytes(tmp_path: Path) -> None:
    own = tokenizer_of(tmp_path, **PIECEWISE)
    pieces = [own.hf.convert_ids_to_tokens(i) for i in own.encode("the and")]
    assert pieces == ["<s>", "▁the", "▁and"]
    assert [own.hf.convert_ids_to_tokens(i) for i in own.encode("é")[1:]] == ["▁", "<0xC3>", "<0xA9>"]
    for text in ("the and", "é 🙂", "than<end_of_turn>"):
        assert own.decode(own.encode(text), skip_special=False).removeprefix("<s>").removeprefix(" ") == text
    assert set(own.eos_token_ids) == {2, PIECES.index("<end_of_turn>")}
    without = tokenizer_of(tmp_path, **PIECEWISE | {"add_space_prefix": False, "add_bos_token": False})
    assert [without.hf.convert_ids_to_tokens(i) for i in without.encode("the and")] == ["t", "he", "▁and"]


def test_gemma_s_runs_of_spaces_are_words_and_its_order_ranks_merges(tmp_path: Path) -> None:
    tokens = ["  " if token == "▁▁" else token for token in PIECES]
    own = tokenizer_of(tmp_path, "gemma", **PIECEWISE | {"tokens": tokens, "scores": [0.0] * len(PIECES)})
    assert [own.hf.convert_ids_to_tokens(i) for i in own.encode("the  ")] == ["<s>", "t", "he", "▁▁"]
    assert own.decode(own.encode("the  and")) == "the  and"


def test_merges_of_scores_are_those_of_transformers() -> None:
    vocab, scores = {piece: i for i, piece in enumerate(PIECES)}, dict(zip(PIECES, SCORES, strict=True))
    expected = [tuple(merge) for merge in generate_merges(vocab, scores)]
    assert merges_of(vocab, PIECES, SCORES, TYPES) == expected and ("▁th", "e") in expected


BYTES = ["<|endoftext|>", *"0123456789ab", "Ġ", "12", "ab", "Ġa", "Ġab"]
MERGES = ["1 2", "a b", "Ġ a", "Ġ ab"]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "12 ab", ["12", "Ġab"]),
        ("smollm", "12 ab", ["1", "2", "Ġab"]),
        ("qwen2", "12 ab", ["1", "2", "Ġab"]),
        ("llama-bpe", "12 ab", ["12", "Ġab"]),
        ("tekken", "12 ab", ["1", "2", "Ġab"]),
        ("gpt-4o", "12 ab", ["12", "Ġab"]),
    ],
)
def test_the_rule_for_words_decides_whether_digits_merge(
    tmp_path: Path, pre: str, text: str, expected: list[str]
) -> None:
    options = {"tokens": BYTES, "token_type": [3] + [1] * (len(BYTES) - 1), "merges": MERGES, "pre": pre}
    own = tokenizer_of(tmp_path, **options, eos_token_id=0, bos_token_id=0, eot_token_id=None)
    assert [own.hf.convert_ids_to_tokens(i) for i in own.encode(text)] == expected


def test_whole_words_go_before_merges_in_llama_3(tmp_path: Path) -> None:
    # no merge leads to "ab": only the vocabulary of Llama 3 takes it whole
    options = {"tokens": BYTES, "token_type": [3] + [1] * (len(BYTES) - 1), "merges": ["1 2"], "eot_token_id": None}
    for pre, expected in (("llama-bpe", ["ab"]), ("qwen2", ["a", "b"])):
        own = tokenizer_of(tmp_path, **options, pre=pre, eos_token_id=0, bos_token_id=0)
        assert [own.hf.convert_ids_to_tokens(i) for i in own.encode("ab")] == expected
    spec = Core(BPE({"a": 0, "b": 1, "ab": 2}, [], ignore_merges=True))
    assert spec.encode("ab").tokens == ["ab"]


def test_ids_of_special_tokens_that_no_token_has_are_none(tmp_path: Path) -> None:
    """Files without a padding token have 2^32 - 1 there, which was an IndexError."""
    none = (1 << 32) - 1
    changed = {"bos_token_id": none, "padding_token_id": none, "unknown_token_id": len(PIECES)}
    own = tokenizer_of(tmp_path, **PIECEWISE | changed)
    assert [own.hf.convert_ids_to_tokens(i) for i in own.encode("the and")] == ["▁the", "▁and"]
    assert own.hf.pad_token is None and set(own.eos_token_ids) == {2, PIECES.index("<end_of_turn>")}
