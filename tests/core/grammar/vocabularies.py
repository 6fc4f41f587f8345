"""Vocabularies for grammar tests: single bytes, and a byte-level BPE trained in memory on texts of many kinds."""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from graftlm.core.grammar.automata.dfa import Dfa, Place
from graftlm.core.grammar.automata.stack.dpda import Dpda
from graftlm.core.grammar.masks.mask_rows import MaskRows
from graftlm.core.grammar.masks.packed_row import write
from graftlm.core.grammar.vocabulary import Vocabulary

_CORPUS = [
    '{"name":"Ada Lovelace","age":36,"email":"ada@analytical.org","active":true,"score":98.5,"role":"admin"}',
    '{"order_id":"A-10293","customer":{"first_name":"Grace","last_name":"Hopper"},"tags":["gift","express"]}',
    '{"items":[{"sku":"SKU-1","quantity":2,"unit_price":19.99},{"sku":"SKU-99","quantity":1}],"paid":false}',
    '{"city":"Zürich","größe":null,"名前":"山田","emoji":"😀😀","text":"a \\"quoted\\" line\\n"}',
    "the quick brown fox jumps over the lazy dog; hello hello world 2024-11-29 and 1999-01-05",
    "def main(argument_one, argument_two):\n    return argument_one + argument_two\n",
    "192.168.0.1 +1 (415) 555-0134 north south northwest northeast southwest southeast unknown",
]


@cache
def byte_vocabulary() -> Vocabulary:
    """One token per byte, then one end-of-sequence id: 257 tokens."""
    return Vocabulary([bytes([b]) for b in range(256)] + [b""], eos_token_id=256)


@cache
def bpe_tokenizer() -> PreTrainedTokenizerFast:
    """About 700 tokens, which split words, punctuation and characters in the ways that published ones do."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=800, initial_alphabet=alphabet, special_tokens=["<eos>"])
    tokenizer.train_from_iterator(_CORPUS * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


@cache
def bpe_vocabulary() -> Vocabulary:
    return Vocabulary.from_tokenizer(bpe_tokenizer())


def allowed(row: npt.NDArray[np.int32]) -> set[int]:
    """The ids whose bits are set in a mask row."""
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def row_at(masks: MaskRows, place: Place) -> npt.NDArray[np.int32]:
    """The mask row at `place`, written over one of other tokens."""
    row = np.full(masks._vocabulary.num_words, 0x55555555, np.int32)
    write(masks.row(place), row)
    return row


def allowed_at(masks: MaskRows, place: Place) -> set[int]:
    """The tokens that may follow at `place`."""
    return allowed(row_at(masks, place))


def continued(automaton: Dfa | Dpda, vocabulary: Vocabulary, suffix: bytes, place: Place) -> int | None:
    """By brute force: the first place in `suffix` from which on it begins a longer token that follows `place`."""
    for start in range(len(suffix)):
        begun = suffix[start:]
        rests = [t[len(begun) :] for t in vocabulary.tokens if t.startswith(begun) and len(t) > len(begun)]
        if any(automaton.walk(place, rest) is not None for rest in rests):
            return start
    return None
