"""Vocabulary slices: the tokens that consist of one class of characters, found once per vocabulary.

Inside a JSON string nearly every token is allowed, and a trie walk over all of them takes a millisecond. Which tokens
consist of string characters alone does not depend on the grammar. A slice holds their mask. The other tokens still have
to be walked, but only what follows the characters they begin with: quotes, backslashes, or a part of a character.
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from graftlm.core.grammar.automata.jit import Int32Array
from graftlm.core.grammar.masks import workers
from graftlm.core.grammar.masks.trie import LeavingTokens, SortedTokens, Trie

if TYPE_CHECKING:
    import numpy.typing as npt

BACKSLASH = 0x5C
_MAX_SLICES = 64
_MAX_TRIES = 16
_NONE, _NO_CHARACTERS, _ESCAPE = 128, 129, 130


@dataclass(frozen=True)
class CharClass:
    """Characters that may come first and that may follow: a flag per ASCII byte, and one for all other characters.

    escaped  a flag per ASCII byte that is a character behind a backslash, where `first` is `rest`; b"" for none
    """

    first: bytes
    rest: bytes
    wide_first: bool
    wide_rest: bool
    escaped: bytes = b""


def _wide_class(members: Iterable[bool], escaped: bytes = b"") -> CharClass:
    ascii_members = bytes(members)
    return CharClass(ascii_members, ascii_members, True, True, escaped and _flags(escaped))


def _flags(members: bytes) -> bytes:
    return bytes(byte in members for byte in range(128))


_RAW = tuple(byte >= 0x20 and byte not in b'"\\' for byte in range(128))
JSON_STRING = _wide_class(_RAW, b'"\\/bfnrt')
JSON_NAME = _wide_class(_RAW, b'"\\bfnrt')
"""The text of a member's name, or that a pattern describes: each character has one spelling."""
LINE = _wide_class(byte != 0x0A for byte in range(128))  # what `.` matches
COMMON = (JSON_STRING, JSON_NAME, LINE)


class Slice:
    """The tokens made of one class of characters, and the others.

    lengths  int16 [vocab_size]: characters of each token that is inside, else 0
    """

    def __init__(self, tokens: SortedTokens, chars: CharClass, vocab_size: int) -> None:
        wide = np.ones(128, np.uint8)
        rest = np.concatenate([np.frombuffer(chars.rest, np.uint8), wide * chars.wide_rest])
        first = np.concatenate([np.frombuffer(chars.first, np.uint8), wide * chars.wide_first])
        fits = rest[tokens.data]
        starts = tokens.offsets[:-1]
        fits[starts] = first[tokens.data[starts]]
        inside = np.logical_and.reduceat(fits, starts) if len(starts) else np.zeros(0, bool)
        if chars.wide_first or chars.wide_rest:
            inside &= tokens.whole_characters
        lengths = np.where(inside, tokens.num_characters, 0)
        self._escapes: dict[int, tuple[int, int, int]] = {}
        if chars.escaped:
            allowed, ends = fits != 0, tokens.offsets[1:]
            for i in np.flatnonzero(tokens.holding(BACKSLASH)).tolist():
                here = slice(starts[i], ends[i])
                found = _read_characters(tokens.data[here].tobytes(), allowed[here].tolist(), chars.escaped)
                self._escapes[i] = found
                if found[2] == _NONE and tokens.whole_characters[i]:
                    inside[i], lengths[i] = True, tokens.num_characters[i] - found[1]
        self.lengths = np.zeros(vocab_size, np.int16)
        self.lengths[tokens.ids] = np.minimum(lengths, np.iinfo(np.int16).max)
        self.longest = int(lengths.max(initial=0))
        self._chars, self._tokens, self._fits, self._outside = chars, tokens, fits, ~inside
        self._leaving: dict[bytes, LeavingTokens] = {}
        self.all_inside = self._row(self.lengths > 0)

    def row(self, room: int | None) -> Int32Array:
        """The mask row of the tokens inside with at most `room` characters; not to be written to."""
        if room is None or room >= self.longest:
            return self.all_inside
        return self._rows_by_length[room]

    def knows(self, exits: bytes | None) -> bool:
        """Whether `leaving(exits)`, or for None `others`, was asked for before, and is at hand."""
        return "others" in self.__dict__ if exits is None else exits in self._leaving

    @cached_property
    def others(self) -> Trie:
        """The trie of the tokens that are not inside."""
        return Trie.build(self._tokens, self._outside)

    def leaving(self, exits: bytes) -> LeavingTokens:
        """The tokens that are not inside and may follow where only certain bytes leave the class.

        exits  a flag per ASCII byte; then, where escapes are characters, one per byte behind a backslash that is none
        """
        found = self._leaving.get(exits)
        if found is None:
            allowed = np.zeros(_ESCAPE + 128, bool)
            for flags, first in ((exits[:128], 0), (b"\1", _NONE), (exits[128:], _ESCAPE)):
                allowed[first : first + len(flags)] = np.frombuffer(flags, np.uint8)
            by, counts, ends = self._left
            places = np.flatnonzero(self._outside & allowed[by])
            character = self._chars.rest.index(1)
            found = LeavingTokens.of(self._tokens, places, counts[places], ends[places], character)
            while len(self._leaving) >= _MAX_TRIES:
                self._leaving.pop(next(iter(self._leaving)), None)
            self._leaving[exits] = found
        return found

    @cached_property
    def _left(self) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """How each token leaves the class: by which byte, after how many characters, and where in the data these end.

        The byte is 128 where there is none, but for a part of a character at the token's end; 129 where the bytes
        before are no characters of the class, as all beyond ASCII may be; 130 and more, where escapes are characters,
        for a backslash and the byte of this number less 130.
        """
        data, starts = self._tokens.data, self._tokens.offsets[:-1]
        if not len(starts):
            return np.zeros(0, np.int16), np.zeros(0, np.int64), np.zeros(0, np.int64)
        place = np.minimum.reduceat(np.where(self._fits != 0, len(data), np.arange(len(data))), starts)
        by = np.append(np.where(data < 0x80, data, np.uint8(_NO_CHARACTERS)), np.uint8(_NONE))[place].astype(np.int16)
        ends = np.minimum(place, self._tokens.offsets[1:])
        num_escapes = np.zeros(len(starts), np.int64)
        for i, (end, num, left) in self._escapes.items():
            ends[i], num_escapes[i], by[i] = starts[i] + end, num, left
        counts = ends - starts - num_escapes
        wide = np.append(0, np.cumsum(data >= 0x80))
        for i in np.flatnonzero(self._outside & (wide[ends] > wide[starts])).tolist():
            try:
                begun = data[starts[i] : ends[i]].tobytes()
                text, num_bytes = codecs.utf_8_decode(begun, "strict", bool(by[i] != _NONE))
                counts[i], ends[i] = len(text) - num_escapes[i], starts[i] + num_bytes
            except UnicodeDecodeError:
                by[i] = _NO_CHARACTERS
        return by, counts, ends

    @cached_property
    def _rows_by_length(self) -> list[Int32Array]:
        rows: list[Int32Array] = []
        for room in range(self.longest):
            fits = (self.lengths > 0) & (self.lengths <= room)
            new = not rows or (self.lengths == room).any()  # most of the long lengths have no token
            rows.append(self._row(fits) if new else rows[-1])
        return rows

    def _row(self, allowed: npt.NDArray[np.bool_]) -> Int32Array:
        padded = np.zeros((len(allowed) + 31) // 32 * 32, bool)
        padded[: len(allowed)] = allowed
        return np.packbits(padded, bitorder="little").view(np.int32)


def _read_characters(data: bytes, fits: list[bool], escaped: bytes) -> tuple[int, int, int]:
    """Read the characters of a class that `data` begins with, of which some are escapes.

    fits  whether each byte by itself is a character, or a part of one beyond ASCII
    -> where they end, how many are escapes, and by what the text leaves them, as in `Slice._left`. A backslash at the
    end begins a character.
    """
    place, num_escapes = 0, 0
    while place < len(data):
        if fits[place] or data[place] == BACKSLASH and place + 1 == len(data):
            place += 1
            continue
        is_escape = data[place] == BACKSLASH
        left = data[place + is_escape]
        if left >= 0x80:
            return place, num_escapes, _NO_CHARACTERS
        if not is_escape or not escaped[left]:
            return place, num_escapes, left + _ESCAPE * is_escape
        place, num_escapes = place + 2, num_escapes + 1
    return place, num_escapes, _NONE


class Slices:
    """The slices of one vocabulary; a rare class gets one only after its trie walks have cost as much.

    A large vocabulary takes 10 to 100 ms for each, which a thread spends: all rows of a batch would wait for it.
    """

    def __init__(self, tokens: SortedTokens, vocab_size: int) -> None:
        self._tokens = tokens
        self._vocab_size = vocab_size
        self._slices: dict[CharClass, Slice] = {}
        self._misses: dict[CharClass, int] = {}
        self._under_way: dict[tuple[CharClass, bytes | None], int] = {}  # the process whose thread builds it

    def has(self, chars: CharClass, exits: bytes | None) -> bool:
        """Whether the slice of `chars` is built, and the tries of what leaves it by `exits`."""
        found = self._slices.get(chars)
        return found is not None and found.knows(exits)

    def get(self, chars: CharClass, exits: bytes | None) -> Slice | None:
        """The slice of `chars`, or None while it is not built or not worth building.

        exits  as of `Slice.leaving`; None for whatever is not inside
        """
        found = self._slices.get(chars)
        if found is not None and found.knows(exits):
            return found
        if found is None and chars not in COMMON:
            misses = self._misses.get(chars, 0)
            if misses < (_MISSES_IF_WIDE if chars.wide_rest else _MISSES):
                if len(self._misses) >= _MAX_MISSES:
                    self._misses.clear()
                self._misses[chars] = misses + 1
                return None
        if len(self._tokens.ids) <= _QUICK:
            return found or self.build(chars)
        key = (chars, exits)
        if self._under_way.get(key) != os.getpid():
            self._under_way[key] = os.getpid()
            workers.masks.submit(self._build_all, chars, exits)
        return None

    def build(self, chars: CharClass) -> Slice:
        while len(self._slices) >= _MAX_SLICES:
            self._slices.pop(next(iter(self._slices)), None)
        found = self._slices[chars] = Slice(self._tokens, chars, self._vocab_size)
        return found

    def _build_all(self, chars: CharClass, exits: bytes | None) -> None:
        """Build the slice of `chars` with all that masks use of it."""
        try:
            found = self._slices.get(chars) or self.build(chars)
            found.row(0)
            if exits is not None:
                found.leaving(exits)
            elif not found.knows(None):
                _ = found.others
        finally:
            self._under_way.pop((chars, exits), None)

    def prepare(self) -> None:
        """Build the slices that most grammars use."""
        for chars in COMMON:
            if chars not in self._slices:
                found = self.build(chars)
                found.row(0)
                if chars in (JSON_STRING, JSON_NAME):
                    found.leaving(_flags(b'"\\') + _flags(b"u"))


_MISSES = 8  # about as many trie walks cost as much as building a slice
_MISSES_IF_WIDE = 3
_MAX_MISSES = 1 << 12
"""Classes whose walks are counted."""
_QUICK = 1 << 12
"""Tokens of a vocabulary whose slices take less than 3 ms."""
