"""A mask row as it is kept: what it has beyond a row that many share."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from graftlm.core.grammar.automata.jit import Int32Array, loop, prepare

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


def pack(row: Int32Array, base: Int32Array) -> PackedRow:
    """Pack `row`, which may be changed afterwards; `base` may not."""
    places = _differences(row, base)
    words = row[places]
    num_bytes = places.nbytes + words.nbytes
    if num_bytes > row.nbytes:
        return row.copy(), _NO_PLACES, _NO_WORDS, row.nbytes
    return base, places, words, num_bytes


def write(packed: PackedRow, row: Int32Array) -> None:
    """Write all words of `row`: int32 [num_words]."""
    base, places, words, _ = packed
    row[:] = base
    row[places] = words


def _differences(row: Int32Array, base: Int32Array) -> npt.NDArray[np.intp]:
    if _compare.machine_code is None:
        prepare()
        return np.flatnonzero(row != base)
    places = np.empty(len(row), np.intp)
    return places[: _compare(row, base, places)].copy()


@loop("i8(i4[::1], i4[::1], i8[::1])", quick=True)
def _compare(row: Int32Array, base: Int32Array, places: npt.NDArray[np.intp]) -> int:
    """Fill `places` with those where `row` differs from `base`. -> how many these are"""
    num = 0
    for place in range(len(row)):
        if row[place] != base[place]:
            places[num] = place
            num += 1
    return num
