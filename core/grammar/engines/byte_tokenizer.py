"""A vocabulary as llguidance takes it."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import TYPE_CHECKING

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


class _PerVocabulary:
    """The tokenizers of the last four vocabularies: one takes half a second at 128k tokens."""

    def __init__(self, capacity: int = 4) -> None:
        self._capacity = capacity
        self._kept: OrderedDict[str, LLTokenizer] = OrderedDict()
        self._lock = Lock()

    def __call__(self, vocabulary: Vocabulary) -> LLTokenizer:
        with self._lock:
            key = vocabulary.fingerprint
            if key not in self._kept:
                self._kept[key] = _build_tokenizer(vocabulary)
                while len(self._kept) > self._capacity:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(key)
            return self._kept[key]

    def __contains__(self, fingerprint: str) -> bool:
        return fingerprint in self._kept


tokenizer_of = _PerVocabulary()
