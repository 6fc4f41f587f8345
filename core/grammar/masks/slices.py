"""Vocabulary slices: the tokens that consist of one class of characters, found once per vocabulary.

Inside a JSON string nearly every token is allowed, and a trie walk over all of them takes a millisecond. Which tokens
consist of string characters alone does not depend on the grammar. A slice holds their mask, and a small trie of the
other tokens (with quotes, backslashes, control characters or parts of characters), which still have to be walked.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from graftlm.core.grammar.automata.dfa import Dfa
from graftlm.core.grammar.automata.jit import Int32Array, inner, loop
from graftlm.core.grammar.masks.trie import SortedTokens, Trie

if TYPE_CHECKING:
    import numpy.typing as npt

    from graftlm.core.grammar.automata.dpda import Dpda

_MAX_SLICES = 64


@dataclass(frozen=True)
class CharClass:
    """Characters that may come first and that may follow: a flag per ASCII byte, and one for all other characters."""

    first: bytes
    rest: bytes
    wide_first: bool
    wide_rest: bool


def _wide_class(members: Iterable[bool]) -> CharClass:
    ascii_members = bytes(members)
    return CharClass(ascii_members, ascii_members, True, True)


JSON_STRING = _wide_class(byte >= 0x20 and byte not in b'"\\' for byte in range(128))
LINE = _wide_class(byte != 0x0A for byte in range(128))  # what `.` matches
COMMON = (JSON_STRING, LINE)


@dataclass(frozen=True)
class SelfLoop:
    """A state's self-loop: a character of `chars` leads back to the state, or counts in `register` up to `maximum`."""

    chars: CharClass
    register: int | None
    maximum: int


class Slice:
    """The tokens made of one class of characters, and the trie of all others.

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
        lengths = np.where(inside, np.minimum(tokens.num_characters, np.iinfo(np.int16).max), 0)
        self.lengths = np.zeros(vocab_size, np.int16)
        self.lengths[tokens.ids] = lengths
        self.longest = int(lengths.max(initial=0))
        self.others = Trie.build(tokens, ~inside)
        self.all_inside = self._row(self.lengths > 0)

    def row(self, room: int | None) -> Int32Array:
        """The mask row of the tokens inside with at most `room` characters; not to be written to."""
        if room is None or room >= self.longest:
            return self.all_inside
        return self._rows_by_length[room]

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


class Slices:
    """The slices of one vocabulary; a rare class gets one only after its trie walks have cost as much."""

    def __init__(self, tokens: SortedTokens, vocab_size: int) -> None:
        self._tokens = tokens
        self._vocab_size = vocab_size
        self._slices: dict[CharClass, Slice] = {}
        self._misses: dict[CharClass, int] = {}

    def get(self, chars: CharClass) -> Slice | None:
        """The slice of `chars`, or None while it is not worth building."""
        found = self._slices.get(chars)
        if found is None:
            misses = self._misses.get(chars, 0)
            if chars not in COMMON and misses < (_MISSES_IF_WIDE if chars.wide_rest else _MISSES):
                self._misses[chars] = misses + 1
                return None
            return self.build(chars)
        return found

    def build(self, chars: CharClass) -> Slice:
        while len(self._slices) >= _MAX_SLICES:
            self._slices.pop(next(iter(self._slices)), None)
        found = self._slices[chars] = Slice(self._tokens, chars, self._vocab_size)
        return found

    def prepare(self) -> None:
        """Build the slices that most grammars use."""
        for chars in COMMON:
            if chars not in self._slices:
                self.build(chars).row(0)


_MISSES = 8  # about as many trie walks cost as much as building a slice
_MISSES_IF_WIDE = 3


def self_loop(automaton: Dfa | Dpda, state: int) -> SelfLoop | None:
    """The class of characters that `state` repeats, if it is large."""
    first, rest = np.empty(128, np.uint8), np.empty(128, np.uint8)
    table, classes, actions = automaton.moves
    found, wide_first, wide_rest, register, maximum = _self_loop(table, classes, actions, state, first, rest)
    if not found:
        return None
    chars = CharClass(first.tobytes(), rest.tobytes(), bool(wide_first), bool(wide_rest))
    return SelfLoop(chars, None if register < 0 else int(register), int(maximum))


@loop("Tuple((b1, b1, b1, i8, i8))(i4[:,::1], u1[::1], i4[:,::1], i8, u1[::1], u1[::1])")
def _self_loop(
    table: Int32Array,
    classes: npt.NDArray[np.uint8],
    actions: Int32Array,
    state: int,
    first: npt.NDArray[np.uint8],
    rest: npt.NDArray[np.uint8],
) -> tuple[bool, bool, bool, int, int]:
    """Fill `first` and `rest` with flags per ASCII byte. -> found, wide first, wide rest, register or -1, maximum"""
    nothing = (False, False, False, -1, -1)
    # what most bytes do: a majority vote
    effect, votes = 0, 0
    for byte in range(128):
        value = table[state, classes[byte]]
        if value != 0:
            if votes == 0:
                effect = value
            votes += 1 if value == effect else -1
    register, maximum = -1, -1
    low, top = 0, 0
    mid = effect
    if effect < 0:
        register, maximum = actions[-effect, 0], actions[-effect, 2]
        low, mid, top = actions[-effect, 3], actions[-effect, 4], actions[-effect, 5]
        if register < 0 and low + top != 0:
            return nothing
    num_rest = 0
    for byte in range(128):
        c = classes[byte]
        first[byte] = table[state, c] == effect and effect != 0
        rest[byte] = 0
        again = effect if register >= 0 else mid  # what keeps a character inside
        if mid > 0 and table[mid, c] != again or low > 0 and table[low, c] != again:
            continue
        if top > 0 and table[top, c] != 0:
            return nothing  # what follows could take over where the count ends
        rest[byte] = 1
        num_rest += 1
    if num_rest < 16:
        return nothing
    wide_first = _wide(table, classes, state, effect)
    again = effect if register >= 0 else mid
    wide_rest = (mid == 0 or _wide(table, classes, mid, again)) and (low == 0 or _wide(table, classes, low, again))
    if top > 0:
        for byte in range(0xC2, 0xF5):
            if table[top, classes[byte]] != 0:
                wide_rest = False
    return True, wide_first, wide_rest, register, maximum


@inner
def _same(table: Int32Array, classes: npt.NDArray[np.uint8], state: int, low: int, high: int) -> int:
    """What all bytes from `low` to `high` do in `state`, or 0 where they differ."""
    value = table[state, classes[low]]
    for byte in range(low + 1, high + 1):
        if table[state, classes[byte]] != value:
            return 0
    return int(value)


@inner
def _wide(table: Int32Array, classes: npt.NDArray[np.uint8], state: int, effect: int) -> bool:
    """Whether every character beyond ASCII has the same effect in `state`."""
    # lead bytes first to last, the range of the second byte, and how many bytes follow that
    for lead, last, low, high, more in (
        (0xC2, 0xDF, 0x80, 0xBF, 0),
        (0xE0, 0xE0, 0xA0, 0xBF, 1),
        (0xE1, 0xEC, 0x80, 0xBF, 1),
        (0xED, 0xED, 0x80, 0x9F, 1),
        (0xEE, 0xEF, 0x80, 0xBF, 1),
        (0xF0, 0xF0, 0x90, 0xBF, 2),
        (0xF1, 0xF3, 0x80, 0xBF, 2),
        (0xF4, 0xF4, 0x80, 0x8F, 2),
    ):
        value = _same(table, classes, state, lead, last)
        if value > 0:
            value = _same(table, classes, value, low, high)
        for _ in range(more):
            if value > 0:
                value = _same(table, classes, value, 0x80, 0xBF)
            else:
                return False
        if value != effect or value == 0:
            return False
    return True
