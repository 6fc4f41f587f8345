"""The table of a deterministic automaton over classes of bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from typing import TYPE_CHECKING

import numpy as np

from graftlm.core.grammar.automata.jit import Int32Array

if TYPE_CHECKING:
    import numpy.typing as npt


LONGEST_RUN = 1 << 16
"""Forced bytes that are found at once."""


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

    def run(self, place: tuple[int, ...]) -> tuple[bytes, tuple[int, ...]]:
        """The bytes that must follow, and where they lead: states with one way on and no way to end."""
        data = bytearray()
        byte = self.single(place[0])
        while byte >= 0 and len(data) < LONGEST_RUN:
            after = self.walk(place, bytes((byte,)))
            assert after is not None
            data.append(byte)
            place = after
            byte = self.single(place[0])
        return bytes(data), place

    @cached_property
    def first_bytes(self) -> list[int]:
        """The smallest byte of each class."""
        first: list[int] = np.searchsorted(self.classes, np.arange(self.table.shape[1])).tolist()
        return first

    def degree(self, state: int) -> int:
        """How many bytes a state has a transition on."""
        return self._ways(state)[0]

    def single(self, state: int) -> int:
        """The one byte that a singular state allows, -1 for the others."""
        return self._ways(state)[1]

    def _ways(self, state: int) -> tuple[int, int]:
        """Both; computed for the states that texts come to, which are few of a large table."""
        found = self._known_ways.get(state)
        if found is None:
            row = self._flat[state * self._width : (state + 1) * self._width]
            degree = sum(compress(self._class_sizes, row))
            is_singular = degree == 1 and not self.accepting[state]
            single = next(compress(self.first_bytes, row)) if is_singular else -1
            found = self._known_ways[state] = (degree, single)
        return found

    @cached_property
    def _known_ways(self) -> dict[int, tuple[int, int]]:
        return {}

    @cached_property
    def _flat(self) -> memoryview[int]:
        return memoryview(self.table.tobytes()).cast("i")

    @cached_property
    def _width(self) -> int:
        return int(self.table.shape[1])

    @cached_property
    def _class_of(self) -> bytes:
        return self.classes.tobytes()

    @cached_property
    def _class_sizes(self) -> list[int]:
        found: list[int] = np.bincount(self.classes, minlength=self.table.shape[1]).tolist()
        return found
