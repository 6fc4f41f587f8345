"""Incremental tokenisation of a growing transcript: ids of a known prefix are reused."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from graftlm.core.text.tokenizer import Tokenizer
from guidance.models._transformers import TransformersTokenizer

_BOUNDARY = re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])")
_ACROSS = re.compile(rb"[A-Za-z] [A-Za-z]")
_WINDOW = 512  # characters at the end in which a boundary is searched
_LONG = 1024  # characters of an appended text that is tokenised at once
_LONGEST_KEPT = 1 << 18  # characters of the longest text that is cached for other programs
_KEPT = 4  # number of cached texts
_GUARD = "a"
_SAMPLES = ("one two  three\nfour", 'é x "y z", {"a b": 1}\n\n c d', "It's 3.5 o'clock now <b> e")


@dataclass(frozen=True)
class Known:
    """The ids of a text up to its last boundary, a position that no token of a longer text spans."""

    text: str = ""
    ids: tuple[int, ...] = ()


class PromptTokens:
    """Tokenises transcripts as guidance does, from the last boundary of the known prefix.

    A boundary is a space between two letters. If a token of the vocabulary can span a boundary, every text is tokenised
    as a whole.
    """

    def __init__(self, tokenizer: TransformersTokenizer, native: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._native = native
        self._settled: tuple[Known, ...] = ()  # cached long prefixes of programs, newest first

    def encode(self, text: str, known: Known) -> tuple[list[int], Known]:
        """Return the ids of `text`, and the value of `known` for a longer text."""
        if not self.splits or not text.startswith(known.text):
            return self._whole(text), Known()
        known = self._longest(text, known)
        at = _last_boundary(text)
        if at <= len(known.text):
            return [*known.ids, *self._rest(text, len(known.text))], known
        known = Known(text[:at], (*known.ids, *self._rest(text[:at], len(known.text))))
        return [*known.ids, *self._rest(text, at)], known

    def settle(self, text: str, known: Known) -> Known:
        """Extend `known` over a long text and cache it, so that all branches use the same ids."""
        known = self._longest(text, known)
        if len(text) - len(known.text) < _LONG:
            return known
        known = self.encode(text, known)[1]
        if _LONG <= len(known.text) <= _LONGEST_KEPT and all(other.text != known.text for other in self._settled):
            self._settled = (known, *self._settled[: _KEPT - 1])
        return known

    def with_bos(self, ids: list[int]) -> list[int]:
        """Return the ids of a whole text after the beginning-of-text token, if the model has one."""
        bos = self._tokenizer.bos_token_id
        if bos is None or ids[:1] == [bos]:
            return ids
        return [bos, *ids] if self._bos_stands_alone else list(self._tokenizer.recode([bos, *ids]))

    @cached_property
    def splits(self) -> bool:
        """True if texts may be tokenised in two parts at a boundary."""
        added = self._native.hf.added_tokens_decoder.values()
        if any(token.content[:1].isalpha() or _ACROSS.search(token.content.encode()) for token in added):
            return False
        if any(_ACROSS.search(token) for token in self._native.token_bytes):
            return False
        return all(
            self._whole(text) == [*self._whole(text[: at.start()]), *self._rest(text, at.start())]
            for text in _SAMPLES
            for at in _BOUNDARY.finditer(text)
        )

    def _rest(self, text: str, start: int) -> list[int]:
        """Return the ids of the text after a boundary."""
        if start == 0:
            return self._whole(text)
        return self._whole(_GUARD + text[start:])[self._num_guard_ids :]

    def _whole(self, text: str) -> list[int]:
        return self._tokenizer.encode(text.encode())

    @cached_property
    def _num_guard_ids(self) -> int:
        return len(self._whole(_GUARD))

    @cached_property
    def _bos_stands_alone(self) -> bool:
        bos = self._tokenizer.bos_token_id
        assert bos is not None
        texts = [self._whole(text) for text in (*_SAMPLES, " x", "x")]
        return all(list(self._tokenizer.recode([bos, *ids])) == [bos, *ids] for ids in texts)

    def _longest(self, text: str, known: Known) -> Known:
        """Return the longest known prefix of `text`: `known`, or a cached one."""
        for other in self._settled:
            if len(other.text) > len(known.text) and text.startswith(other.text):
                known = other
        return known


def _last_boundary(text: str) -> int:
    """Return the last boundary of a text; 0 without one near its end."""
    start = max(len(text) - _WINDOW, 1)
    at = text.rfind(" ", start, len(text) - 1)
    while at >= 0:
        sides = text[at - 1] + text[at + 1]
        if sides.isascii() and sides.isalpha():
            return at
        at = text.rfind(" ", start, at)
    return 0
