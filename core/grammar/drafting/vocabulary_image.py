"""VocabularyImage: a vocabulary as it is sent to the processes that draft for it."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from graftlm.core.grammar.vocabulary import Vocabulary
from graftlm.core.text.word_encoder import WordEncoder

if TYPE_CHECKING:
    from graftlm.core.text.tokenizer import Tokenizer


class VocabularyImage(NamedTuple):
    """What a vocabulary and its encoder are made of.

    data           all tokens, one behind the other, and `lengths`, int32 [vocab_size] as bytes
    eos_token_ids  as in the vocabulary
    core           the `tokenizers.Tokenizer` that encodes text which follows other text, pickled
    fingerprint    of the vocabulary
    """

    data: bytes
    lengths: bytes
    eos_token_ids: tuple[int, ...]
    core: bytes
    fingerprint: str

    @classmethod
    def of(cls, vocabulary: Vocabulary, tokenizer: Tokenizer) -> VocabularyImage | None:
        """None where the tokenizer has no core of its own, or one that cannot be sent."""
        core = tokenizer.continuation_backend or tokenizer.backend
        if core is None:
            return None
        try:
            pickled = pickle.dumps(core)
        except Exception:  # parts of it are written in Python
            return None
        tokens = vocabulary.tokens
        lengths = np.fromiter(map(len, tokens), np.int32, len(tokens)).tobytes()
        return cls(b"".join(tokens), lengths, vocabulary.eos_token_ids, pickled, vocabulary.fingerprint)

    def vocabulary(self) -> Vocabulary:
        """The vocabulary, ready for use."""
        ends = np.frombuffer(self.lengths, np.int32).cumsum().tolist()
        tokens = [self.data[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        encoder = WordEncoder(_Core(pickle.loads(self.core)))
        found = Vocabulary(tokens, eos_token_id=self.eos_token_ids, encode=encoder, ends_word=encoder.ends_word)
        found.prepare()
        return found


class _Core:
    """A tokenizer that only goes on with texts."""

    continuation_backend = None

    def __init__(self, backend: Any) -> None:
        self.backend = backend

    def encode_continuation(self, text: str) -> list[int]:
        return list(self.backend.encode(text, add_special_tokens=False).ids)
