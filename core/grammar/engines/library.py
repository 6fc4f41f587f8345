"""Matchers and per-vocabulary objects of a grammar library."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from graftlm.core.grammar.matcher import MaskRow
from graftlm.core.grammar.vocabulary import Vocabulary

T = TypeVar("T")


class PerVocabulary(Generic[T]):
    """What a library builds once per vocabulary (half a second at 128k tokens); the last four are kept."""

    def __init__(self, build: Callable[[Vocabulary], T], capacity: int = 4) -> None:
        self._build = build
        self._capacity = capacity
        self._kept: OrderedDict[str, T] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, vocabulary: Vocabulary) -> T:
        with self._lock:
            key = vocabulary.fingerprint
            if key not in self._kept:
                self._kept[key] = self._build(vocabulary)
                while len(self._kept) > self._capacity:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(key)
            return self._kept[key]

    def __contains__(self, fingerprint: str) -> bool:
        return fingerprint in self._kept


class LibraryMatcher(ABC):
    """One sequence in a library's matcher: see `graftlm.core.grammar.matcher.Matcher`.

    The library's matcher only sees tokens that have bytes. End-of-sequence is handled here: it is allowed exactly in
    accepting states and stops the sequence.
    """

    __slots__ = ("_matcher", "_num_consumed", "_stopped", "_vocabulary")

    def __init__(self, matcher: Any, vocabulary: Vocabulary) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._num_consumed = 0  # without end-of-sequence
        self._stopped = False

    @abstractmethod
    def _consume(self, token_ids: list[int]) -> int:
        """Advance the library's matcher; return how many tokens it accepted."""

    @abstractmethod
    def _copy(self) -> Any:
        """An independent copy of the library's matcher."""

    @abstractmethod
    def _accepts(self) -> bool:
        """Whether the text may end here."""

    def advance(self, token_ids: Sequence[int]) -> int:
        if self._stopped:
            return 0
        ids = [int(token_id) for token_id in token_ids]
        end = next((i for i, token_id in enumerate(ids) if not self._has_bytes(token_id)), len(ids))
        consumed = self._consume(ids[:end]) if end else 0
        self._num_consumed += consumed
        if consumed == end < len(ids) and ids[end] in self._vocabulary.eos_token_ids and self.accepting:
            self._stopped = True
            return consumed + 1
        return consumed

    def rollback(self, num_tokens: int) -> None:
        total = self._num_consumed + self._stopped
        if not 0 <= num_tokens <= total:
            raise ValueError(f"cannot undo {num_tokens} tokens; {total} were consumed")
        if self._stopped and num_tokens:
            self._stopped = False
            num_tokens -= 1
        if num_tokens:
            self._matcher.rollback(num_tokens)
            self._num_consumed -= num_tokens

    def fork(self) -> Any:
        twin = type(self)(self._copy(), self._vocabulary)
        twin._num_consumed, twin._stopped = self._num_consumed, self._stopped
        return twin

    @property
    def accepting(self) -> bool:
        return self._stopped or self._accepts()

    def _has_bytes(self, token_id: int) -> bool:
        return 0 <= token_id < self._vocabulary.vocab_size and bool(self._vocabulary.tokens[token_id])


def allow_eos(row: MaskRow, vocabulary: Vocabulary, allowed: bool) -> None:
    """Set or clear the bits of all end-of-sequence ids."""
    bits = row.view(np.uint32)
    for token_id in vocabulary.eos_token_ids:
        bit = np.uint32(1 << (token_id & 31))
        bits[token_id >> 5] = bits[token_id >> 5] | bit if allowed else bits[token_id >> 5] & ~bit


def clear_beyond(row: MaskRow, vocabulary: Vocabulary) -> None:
    """Clear the bits after the last token of the vocabulary."""
    if vocabulary.vocab_size & 31:
        row.view(np.uint32)[-1] &= np.uint32((1 << (vocabulary.vocab_size & 31)) - 1)
