"""A vocabulary as llguidance takes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graftlm.core.grammar.engines.library import PerVocabulary
from graftlm.core.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLTokenizer


class _ByteTokenizer:
    """The tokenizer interface that llguidance's TokenizerWrapper expects."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        ends = vocabulary.eos_token_ids
        self.tokens = vocabulary.tokens if ends else [*vocabulary.tokens, b""]
        self.eos_token_id = ends[0] if ends else vocabulary.vocab_size
        self.special_token_ids = [i for i, data in enumerate(self.tokens) if not data]
        self._vocabulary = vocabulary

    def __call__(self, data: bytes | str) -> list[int]:
        return self._vocabulary.encode(data.encode() if isinstance(data, str) else data)


def _build_tokenizer(vocabulary: Vocabulary) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_ByteTokenizer(vocabulary)))


tokenizer_of = PerVocabulary(_build_tokenizer)
