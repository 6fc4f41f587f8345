"""The table of a deterministic automaton over classes of bytes.

What is read from it is kept in bytes and tuples of numbers rather than lists: collections look at each list, and an
automaton may be kept for as long as the process lives.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from graftlm.core.grammar.automata.jit import Int32Array, loop

if TYPE_CHECKING:
    import numpy.typing as npt


LONGEST_RUN = 1 << 16
"""Forced bytes that are found at once."""


@loop("void(i4[:,::1], u1[::1], b1[::1], i2[::1], i2[::1])")
def count_bytes(
    table: Int32Array,
    classes: npt.NDArray[np.uint8],
    accepting: npt.NDArray[np.bool_],
    degrees: npt.NDArray[np.int16],
    singles: npt.NDArray[np.int16],
) -> None:
    """Fill `degrees` with the number of bytes on which each state has a transition, and `singles` with
    the one byte of a singular state, -1 for others.
    """
    num_states, num_classes = table.shape
    sizes, bytes_of = np.zeros(num_classes, np.int32), np.zeros(num_classes, np.int32)
    for byte in range(256):
        sizes[classes[byte]] += 1
        bytes_of[classes[byte]] = byte
    for state in range(num_states):
        degree, byte_sum = np.int32(0), np.int32(0)
        for c in range(num_classes):
            degree += sizes[c] if table[state, c] != 0 else 0
            byte_sum += bytes_of[c] if table[state, c] != 0 else 0
        degrees[state] = degree
        singles[state] = byte_sum if degree == 1 and not accepting[state] else -1


@dataclass(frozen=True, eq=False)
class StateTable(ABC):
    """What each state does with each byte.

    classes    uint8 [256], class of each byte
    table      int32 [num_states, num_classes]: 0 where a byte is not allowed; row 0 is of no state
    accepting  bool [num_states]
    """

    classes: npt.NDArray[np.uint8]
    table: Int32Array
    accepting: npt.NDArray[np.bool_]

    @cached_property
    def returns(self) -> npt.NDArray[np.bool_]:
        """bool [num_states]: a byte that the state does not read may be read by the state below it on a stack."""
        return np.zeros(len(self.table), np.bool_)

    @property
    def num_states(self) -> int:
        return len(self.table)

    @abstractmethod
    def walk(self, place: tuple[int, ...], data: bytes) -> tuple[int, ...] | None:
        """The place after `data`, or None when it is not allowed. A place begins with its state."""

    @abstractmethod
    def accepts(self, place: tuple[int, ...]) -> bool:
        """Whether the text may end here."""

    @property
    @abstractmethod
    def start(self) -> tuple[int, ...]:
        """The place before any text."""

    def matches(self, data: bytes) -> bool:
        """Whether `data` as a whole is in the language."""
        place = self.walk(self.start, data)
        return place is not None and self.accepts(place)

    def is_singular(self, place: tuple[int, ...]) -> bool:
        """Whether one byte must follow."""
        return self._singles[place[0]] >= 0

    @abstractmethod
    def run(self, place: tuple[int, ...]) -> tuple[bytes, tuple[int, ...]]:
        """The bytes that must follow, and where they lead: states with one way on and no way to end."""

    @cached_property
    def first_bytes(self) -> bytes:
        """The smallest byte of each class."""
        return np.searchsorted(self.classes, np.arange(self.table.shape[1])).astype(np.uint8).tobytes()

    def degree(self, state: int) -> int:
        """How many bytes a state has a transition on."""
        return self._degrees[state]

    @cached_property
    def degrees(self) -> npt.NDArray[np.int16]:
        """int16 [num_states]: `degree` of each."""
        return np.frombuffer(self._degrees, np.int16)

    @property
    def singles(self) -> npt.NDArray[np.int16]:
        """int16 [num_states]: the one byte that each singular state reads, -1 for the others."""
        return np.frombuffer(self._singles, np.int16)

    @cached_property
    def _degrees(self) -> array[int]:
        return self._count()[0]

    @cached_property
    def _singles(self) -> array[int]:
        """The one byte that each singular state allows, -1 for the others."""
        return self._count()[1]

    def _count(self) -> tuple[array[int], array[int]]:
        degrees, singles = np.empty(len(self.table), np.int16), np.empty(len(self.table), np.int16)
        count_bytes(self.table, self.classes, self.accepting, degrees, singles)
        found = array("h", degrees.tobytes()), array("h", singles.tobytes())
        self.__dict__["_degrees"], self.__dict__["_singles"] = found
        return found

    @cached_property
    def _flat(self) -> memoryview[int]:
        return self.table.reshape(-1).data

    @cached_property
    def _width(self) -> int:
        return int(self.table.shape[1])

    @cached_property
    def _class_of(self) -> bytes:
        return self.classes.tobytes()
