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
    """Forced texts in flat memory: as they come from another process, and as they are kept.

    numbers  how many there are; of each the state, in ascending order; the state after it; where its text ends; where
             its ids end; then all ids
    texts    all bytes
    """

    __slots__ = ("_count", "numbers", "texts")

    def __init__(self, numbers: array[int], texts: bytes) -> None:
        self.numbers = numbers
        self.texts = texts
        self._count = numbers[0]

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
        return cls(array("i", [len(known)]) + states + after + text_ends + id_ends + ids, bytes(texts))

    def __reduce__(self) -> tuple[object, ...]:
        return ForcedTexts, (self.numbers, self.texts)

    @property
    def num_bytes(self) -> int:
        return self.numbers.itemsize * len(self.numbers) + len(self.texts)

    def run(self, place: tuple[int, ...]) -> Run | None:
        """The forced bytes at `place` and the place after them; None where that is not known."""
        number = self._find(place)
        if not number:
            return None
        numbers, count = self.numbers, self._count
        first = numbers[2 * count + number - 1] if number > 1 else 0
        return self.texts[first : numbers[2 * count + number]], (numbers[count + number], *place[1:])

    def ids(self, place: tuple[int, ...]) -> tuple[int, ...] | None:
        """The tokens of the forced bytes at `place`."""
        number = self._find(place)
        if not number:
            return None
        numbers, begin = self.numbers, 4 * self._count + 1
        first = numbers[3 * self._count + number - 1] if number > 1 else 0
        return tuple(numbers[begin + first : begin + numbers[3 * self._count + number]])

    def _find(self, place: tuple[int, ...]) -> int:
        """The number of the text at `place`, from 1; 0 for none. Counters that do not run are 0."""
        if any(place[1:]):
            return 0
        number = bisect_left(self.numbers, place[0], 1, 1 + self._count)
        return number if number <= self._count and self.numbers[number] == place[0] else 0
