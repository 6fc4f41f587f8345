"""Text that goes on, encoded word by word: the fixed parts of JSON texts are made of few words.

A word ends where the tokenizer's own description says that its pre-tokenizer always ends one, whatever else the text
holds: in most byte-level tokenizers between letters and punctuation, for one. Only ASCII text is cut.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cached_property
from typing import Any, Protocol

from graftlm.core.text.safe_cuts import description
from graftlm.core.text.split_pattern import ASCII, GPT2, SplitPattern, UnknownPattern

_MAX_WORDS = 1 << 14
_LONGEST_WORD = 32
"""Words whose ids are kept, and their characters."""
_COMPOSING = ("NFC", "NFD", "NFKC", "NFKD")
"""Normalizers that leave ASCII as it is."""

Cuts = dict[str, frozenset[str]]
"""By ASCII character, those that begin a word behind it."""


class Continuing(Protocol):
    """The part of a `graftlm.core.text.tokenizer.Tokenizer` that goes on with texts."""

    @property
    def backend(self) -> Any: ...

    @property
    def continuation_backend(self) -> Any: ...

    def encode_continuation(self, text: str) -> list[int]: ...


class WordEncoder:
    """Encodes as `encode_continuation` of a tokenizer does. Thread-safe."""

    def __init__(self, tokenizer: Continuing) -> None:
        self._tokenizer = tokenizer
        self._ids: dict[str, list[int]] = {}

    def __call__(self, text: str) -> list[int]:
        words = self._words
        if words is None or not text.isascii() or not words.firsts.isdisjoint(text):
            return self._tokenizer.encode_continuation(text)
        ids: list[int] = []
        for word in words.pattern.findall(text):
            ids += self._ids.get(word) or self._encode(word)
        return ids

    def ends_word(self, left: str, right: str) -> bool:
        """Whether two texts, one behind the other, have the ids that each has alone; False where that is not known."""
        words = self._words
        return words is not None and words.ends(left, right)

    def _encode(self, word: str) -> list[int]:
        found = self._tokenizer.encode_continuation(word)
        if len(word) <= _LONGEST_WORD:
            if len(self._ids) >= _MAX_WORDS:
                self._ids.clear()
            self._ids[word] = found
        return found

    @cached_property
    def _words(self) -> Words | None:
        backend = self._tokenizer.continuation_backend or self._tokenizer.backend
        return None if backend is None else Words.of(backend)


class Words:
    """How a tokenizer's core cuts ASCII text.

    pattern  matches one word after the other; each is encoded as it is alone
    firsts   characters that added tokens begin with: a text that holds one is not cut
    """

    def __init__(self, cuts: Cuts, firsts: frozenset[str]) -> None:
        self._cuts = cuts
        lefts: dict[frozenset[str], list[str]] = {}
        for left, rights in cuts.items():
            lefts.setdefault(rights, []).append(left)
        inside = [_class_of(same) + (f"(?!{_class_of(rights)})" if rights else "") for rights, same in lefts.items()]
        self.pattern = re.compile(f"(?:{'|'.join(inside)})*.", re.DOTALL)
        self.firsts = firsts

    def ends(self, left: str, right: str) -> bool:
        """Whether both are text that is cut, and a word ends between them."""
        if not (left.isascii() and right.isascii()) or right[:1] not in self._cuts.get(left[-1:], ()):
            return False
        return self.firsts.isdisjoint(left) and self.firsts.isdisjoint(right)

    @classmethod
    def of(cls, backend: Any) -> Words | None:
        """Read a `tokenizers.Tokenizer`; None where nothing is known to end a word."""
        spec = description(backend)
        if not _leaves_ascii(spec["normalizer"]) or getattr(backend.model, "dropout", None):
            return None
        try:
            cuts = _cuts(spec["pre_tokenizer"])
        except UnknownPattern:
            return None
        if not any(cuts.values()):
            return None
        contents = [token["content"] for token in spec["added_tokens"]]
        if backend.normalizer is not None:
            contents += [backend.normalizer.normalize_str(content) for content in contents]
        return cls(cuts, frozenset(content[0] for content in contents if content))


def _class_of(chars: Iterable[str]) -> str:
    return f"[{''.join(map(re.escape, sorted(chars)))}]"


def _leaves_ascii(spec: dict[str, Any] | None) -> bool:
    if spec is not None and spec["type"] == "Sequence":
        return all(map(_leaves_ascii, spec["normalizers"]))
    return spec is None or spec["type"] in _COMPOSING


def _cuts(spec: dict[str, Any] | None) -> Cuts:
    """Raises UnknownPattern for a pre-tokenizer of which nothing is known."""
    steps = [] if spec is None else spec["pretokenizers"] if spec["type"] == "Sequence" else [spec]
    apart, ended = dict.fromkeys(ASCII, ASCII), dict.fromkeys(ASCII, frozenset[str]())
    for place, step in enumerate(steps):
        kind = step["type"]
        if kind == "ByteLevel":
            if step["add_prefix_space"] or place < len(steps) - 1:  # what follows would read other characters
                raise UnknownPattern(kind)
            pattern = GPT2 if step.get("use_regex", True) else None
        elif kind == "Split" and step["behavior"] in ("Isolated", "Removed"):
            literal = step["pattern"].get("String")
            pattern = step["pattern"]["Regex"] if literal is None else re.escape(literal)
        elif kind == "Digits":
            pattern = None  # tells digits from others character by character
        else:
            raise UnknownPattern(kind)
        if pattern is not None:
            read = SplitPattern.read(pattern, "\n")
            for left, rights in read.apart.items():
                apart[left] &= rights
                ended[left] |= rights if left in read.alone else rights & read.alone
    return {left: rights & ended[left] for left, rights in apart.items()}
