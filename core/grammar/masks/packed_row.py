"""A mask row as it is kept: what it has beyond a row that many share."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from graftlm.core.grammar.automata.jit import Int32Array, loop

if TYPE_CHECKING:
    import numpy.typing as npt

_NO_PLACES, _NO_WORDS = np.zeros(0, np.intp), np.zeros(0, np.int32)


PackedRow: TypeAlias = "tuple[Int32Array, npt.NDArray[np.intp], Int32Array, int]"
"""base, int32 [num_words]: the row that it differs from; places, int64 [num]: the words in which it differs; words,
int32 [num]: these words; and the memory of its own in bytes.

A row of few tokens, or one that differs in few from that of a vocabulary slice, takes a tenth of its memory. New memory
is a page fault for each 4 KiB, which together take longer than most masks. A class of its own, or a named tuple, would
be looked at in every collection; such a tuple, whose parts hold no other objects, is let go at the first.
"""


_scratch = threading.local()


def empty_row(num_words: int) -> Int32Array:
    """A row of zeros to find tokens in, int32 [num_words], which `pack` takes back from the same thread."""
    row: Int32Array | None = getattr(_scratch, "row", None)
    if row is None or len(row) != num_words:
        return np.zeros(num_words, np.int32)
    _scratch.row = None
    return row


def pack(row: Int32Array, base: Int32Array, ends: Int32Array) -> PackedRow:
    """Pack the tokens of `row`, which `empty_row` gave, those of `base`, and some more.

    base  int32 [num_words], not to be changed afterwards
    ends  int32 [num]: ids of the others
    """
    if getattr(_scratch, "places", None) is None or len(_scratch.places) != len(row):
        _scratch.places, _scratch.words = np.empty(len(row), np.intp), np.empty(len(row), np.int32)
    places, words = _scratch.places, _scratch.words
    num = _differences(row, base, ends, places, words)
    _scratch.row = row
    return _packed(base, places[:num].copy(), words[:num].copy())


def _packed(base: Int32Array, places: npt.NDArray[np.intp], words: Int32Array) -> PackedRow:
    num_bytes = places.nbytes + words.nbytes
    if num_bytes <= base.nbytes:
        return base, places, words, num_bytes
    whole = base.copy()
    whole[places] = words
    return whole, _NO_PLACES, _NO_WORDS, whole.nbytes


def take_back(row: Int32Array) -> None:
    """Clear a row that `empty_row` gave, and that is not packed."""
    row[:] = 0
    _scratch.row = row


def write(packed: PackedRow, row: Int32Array) -> None:
    """Write all words of `row`: int32 [num_words]."""
    base, places, words, _ = packed
    row[:] = base
    row[places] = words


@loop("i8(i4[::1], i4[::1], i4[::1], i8[::1], i4[::1])", quick=True)
def _differences(
    row: Int32Array, base: Int32Array, ends: Int32Array, places: npt.NDArray[np.intp], words: Int32Array
) -> int:
    """Fill `places` and `words` with what `row` and `ends` have beyond `base`, and clear `row`. -> how much that is"""
    for token_id in ends:
        row[token_id >> 5] |= np.int32(1) << np.int32(token_id & 31)
    num = 0
    for place in range(len(row)):
        if row[place] != 0:
            word = row[place] | base[place]
            if word != base[place]:
                places[num], words[num] = place, word
                num += 1
            row[place] = 0
    return num
