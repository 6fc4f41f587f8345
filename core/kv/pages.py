"""The KV pool's slots and who owns them.

A slot is one token's place in the pool. Slots are handed out as extents, half-open ranges of neighbouring
slots, so that on a CPU the KV of a radix node is a view rather than a gather; a GPU's block table is the same
extents written out.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

from graftlm.core.errors import EngineError
from graftlm.kernels.wire_plan import Extent


def coalesce(extents: Iterable[Extent]) -> list[Extent]:
    """Join neighbours that follow each other in the pool; order and tokens stay the same."""
    joined: list[Extent] = []
    for extent in extents:
        if joined and joined[-1].stop == extent.start:
            joined[-1] = Extent(joined[-1].start, extent.stop)
        elif extent.stop > extent.start:
            joined.append(extent)
    return joined


class PagePool:
    """Who owns which slots: a free list of extents, sorted and coalesced, and the same extents by size.

    num_slots is fixed, so free + cached + in use == num_slots at all times.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free: list[Extent] = [Extent(0, num_slots)] if num_slots else []
        self._by_size = [(extent.size, extent.start) for extent in self._free]
        self.num_free = num_slots

    def allocate(self, num_slots: int) -> list[Extent] | None:
        """Take `num_slots` slots: one extent where one is large enough (best fit), else the largest ones.

        Returns None, and takes nothing, if fewer are free.
        """
        if num_slots > self.num_free:
            return None
        taken: list[Extent] = []
        while num_slots > 0:
            i = bisect_left(self._by_size, (num_slots, 0))
            if i == len(self._by_size):  # none is large enough: the first of the largest
                i = bisect_left(self._by_size, (self._by_size[-1][0], 0))
            size, start = self._by_size[i]
            taken.append(self._take(bisect_left(self._free, (start, 0)), num_slots))
            num_slots -= taken[-1].size
        return taken

    def num_pieces(self, num_slots: int) -> int:
        """How many extents `allocate` would take so many slots in."""
        count = 0
        for size, _ in reversed(self._by_size):
            if num_slots <= 0:
                break
            count, num_slots = count + 1, num_slots - size
        return count

    def grow(self, extent: Extent, num_slots: int) -> Extent | None:
        """Take up to `num_slots` free slots that directly follow `extent`; None if the next one is taken."""
        i = bisect_left(self._free, (extent.stop, 0))
        if i == len(self._free) or self._free[i].start != extent.stop:
            return None
        return self._take(i, num_slots)

    def free(self, extents: Iterable[Extent]) -> None:
        """Give slots back. Freeing a free slot is an error of ours and raises."""
        for extent in extents:
            if extent.size:
                self._give(extent)

    def _take(self, i: int, num_slots: int) -> Extent:
        whole = self._free[i]
        part = Extent(whole.start, min(whole.stop, whole.start + num_slots))
        self._replace(i, i + 1, [Extent(part.stop, whole.stop)] if part.stop < whole.stop else [])
        self.num_free -= part.size
        return part

    def _give(self, extent: Extent) -> None:
        i = bisect_left(self._free, extent)
        before = self._free[i - 1] if i else None
        after = self._free[i] if i < len(self._free) else None
        if (before and before.stop > extent.start) or (after and extent.stop > after.start):
            raise EngineError(f"slots {extent.start}..{extent.stop} were freed twice")
        start, stop, first, last = extent.start, extent.stop, i, i
        if before and before.stop == start:
            start, first = before.start, i - 1
        if after and after.start == stop:
            stop, last = after.stop, i + 1
        self._replace(first, last, [Extent(start, stop)])
        self.num_free += extent.size

    def _replace(self, first: int, last: int, extents: list[Extent]) -> None:
        """Have `extents` in the place of `first` to `last` of the free list."""
        for start, stop in self._free[first:last]:
            del self._by_size[bisect_left(self._by_size, (stop - start, start))]
        self._free[first:last] = extents
        for start, stop in extents:
            insort(self._by_size, (stop - start, start))
