"""N-gram lookup: find the last tokens of a text earlier in it, or in recent texts."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

PARTING = -1
"""Stands between two texts; no token id."""


class Match(NamedTuple):
    """The last `length` tokens of a text stand right before position `stop` of another."""

    stop: int
    length: int


def find(text: NDArray[np.int32], tail: NDArray[np.int32], most: int) -> Match | None:
    """The latest of the places in `text` where the longest end of `tail` stands, up to its last `most` tokens.

    None if not even the last token is in `text`.
    """
    ends = np.flatnonzero(text == tail[-1])
    if not len(ends):
        return None
    length = 1
    for back in range(1, min(most, len(tail))):
        inside = ends if ends[0] >= back else ends[ends >= back]
        longer = inside[text[inside - back] == tail[-1 - back]]
        if not len(longer):
            break
        ends, length = longer, back + 1
    return Match(int(ends[-1]) + 1, length)


class Recent:
    """The texts that were written last, oldest first, parted by PARTING; at most `size` tokens of them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._buffer = np.empty(size, np.int32)
        self._length = 0

    @property
    def ids(self) -> NDArray[np.int32]:
        """All of them, a view that stays valid until the next `add`."""
        return self._buffer[: self._length]

    def add(self, ids: NDArray[np.int32]) -> None:
        """Put a text last; the older half goes when there is no room."""
        ids = ids[-(self.size // 2 - 1) :]
        if self._length + len(ids) + 1 > self.size:
            kept = self.ids[-(self.size // 2) :].copy()
            self._buffer[: len(kept)] = kept
            self._length = len(kept)
        stop = self._length + len(ids)
        self._buffer[self._length : stop] = ids
        self._buffer[stop] = PARTING
        self._length = stop + 1

    def after(self, stop: int, most: int) -> NDArray[np.int32]:
        """How the text goes on from `stop`, up to `most` tokens."""
        ids = self.ids[stop : stop + most]
        ends = np.flatnonzero(ids == PARTING)
        return ids[: ends[0]] if len(ends) else ids
