"""ForcedTexts: what an automaton forces at some states, and the tokens of it, worked out before anybody asks."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable
from typing import NamedTuple

Run = tuple[bytes, tuple[int, ...]]


class ForcedText(NamedTuple):
    """A forced text: the states where it begins and after it, its bytes, and its tokens after nothing, healed."""

    state: int
    after: int
    text: bytes
    ids: tuple[int, ...]


class ForcedTexts:
    """Forced texts in one piece of memory: as they come from another process, and as they are kept.

    data  numbers, int32: how many there are; of each the state, in ascending order; the state after it; where its text
          ends; where its ids end; then all ids. Behind them all texts, and bytes up to a multiple of 4
    """

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data  # one object, so that a thread that reads never sees parts of two

    @classmethod
    def of(cls, found: Iterable[ForcedText]) -> ForcedTexts:
        """Keep `found`, which comes in ascending order of states."""
        known = list(found)
        text_ends, id_ends, ids = array("i"), array("i"), array("i")
        texts = bytearray()
        for one in known:
            texts += one.text
            ids.extend(one.ids)
            text_ends.append(len(texts))
            id_ends.append(len(ids))
        states, after = array("i", [one.state for one in known]), array("i", [one.after for one in known])
        numbers = array("i", [len(known)]) + states + after + text_ends + id_ends + ids
        return cls(numbers.tobytes() + texts + bytes(-len(texts) % numbers.itemsize))

    def __reduce__(self) -> tuple[object, ...]:
        return ForcedTexts, (self.data,)

    @property
    def num_bytes(self) -> int:
        return len(self.data)

    def replace(self, other: ForcedTexts) -> None:
        """Have what `other` has. From any thread."""
        self.data = other.data

    def run(self, place: tuple[int, ...]) -> Run | None:
        """The forced bytes at `place` and the place after them; None where that is not known."""
        data = self.data
        numbers = memoryview(data).cast("i")
        number = _find(numbers, place)
        if not number:
            return None
        count = numbers[0]
        begin = numbers.itemsize * (1 + 4 * count + numbers[4 * count])
        first = numbers[2 * count + number - 1] if number > 1 else 0
        return data[begin + first : begin + numbers[2 * count + number]], (numbers[count + number], *place[1:])

    def ids(self, place: tuple[int, ...]) -> tuple[int, ...] | None:
        """The tokens of the forced bytes at `place`."""
        numbers = memoryview(self.data).cast("i")
        number = _find(numbers, place)
        if not number:
            return None
        count = numbers[0]
        begin = 4 * count + 1
        first = numbers[3 * count + number - 1] if number > 1 else 0
        return tuple(numbers[begin + first : begin + numbers[3 * count + number]])


def _find(numbers: memoryview[int], place: tuple[int, ...]) -> int:
    """The number of the text at `place`, from 1; 0 for none. Counters that do not run are 0."""
    if any(place[1:]):
        return 0
    count = numbers[0]
    number = bisect_left(numbers, place[0], 1, 1 + count)
    return number if number <= count and numbers[number] == place[0] else 0
