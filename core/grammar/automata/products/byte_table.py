"""Automata as arrays, over classes of bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from graftlm.core.grammar.automata.determinize import ACTION_WIDTH
from graftlm.core.grammar.automata.dfa import UNREACHABLE
from graftlm.core.grammar.automata.distances import list_ways, measure

if TYPE_CHECKING:
    import numpy.typing as npt

Int32Array: TypeAlias = "npt.NDArray[np.int32]"
Int64Array: TypeAlias = "npt.NDArray[np.int64]"

_NO_ACTIONS = np.zeros((1, ACTION_WIDTH), np.int32)


class ByteTable:
    """An automaton as arrays, with bytes that no state tells apart in one class.

    classes    int64 [256]: the class of each byte
    targets    int32 [num_states, num_classes]: the next state; state 0 is dead, 1 starts
    accepting  bool [num_states]
    """

    def __init__(self, classes: Int64Array, targets: Int32Array, accepting: npt.NDArray[np.bool_]) -> None:
        self.classes = classes
        self.targets = targets
        self.accepting = accepting

    def after(self, states: Int32Array, first: int, last: int) -> Int32Array:
        """The states that a byte from `first` to `last` leads to from any of `states`, each once."""
        return np.unique(self.targets[np.ix_(states, np.unique(self.classes[first : last + 1]))])

    def accepts(self, data: bytes) -> bool:
        """Whether `data` as a whole is in the language."""
        state = 1
        for byte in data:
            state = self.targets[state, self.classes[byte]]
        return bool(self.accepting[state])

    def distances(self) -> Int32Array:
        """int32 [num_states]: the fewest bytes to an accepting state, or UNREACHABLE."""
        distance = np.where(self.accepting, 0, UNREACHABLE).astype(np.int32)
        measure(*list_ways(self.targets), _NO_ACTIONS, distance)
        distance[0] = UNREACHABLE
        return distance

    def live(self) -> npt.NDArray[np.bool_]:
        """bool [num_states]: which states can reach an accepting one."""
        live: npt.NDArray[np.bool_] = self.distances() != UNREACHABLE
        return live

    def shortest(self) -> bytes | None:
        """The shortest text, of the lowest bytes; None if there is none."""
        distance, state, data = self.distances(), 1, bytearray()
        if distance[state] == UNREACHABLE:
            return None
        while distance[state]:
            after = self.targets[state][self.classes]
            byte = int(np.argmax(distance[after] == distance[state] - 1))
            data.append(byte)
            state = int(after[byte])
        return bytes(data)

    def trimmed(self) -> ByteTable:
        """The table with its states numbered anew without those that cannot reach an accepting one; the start stays."""
        live = self.live()
        if live[1:].all():
            return self
        live[:2] = True
        numbers = np.where(live, np.cumsum(live) - 1, 0).astype(np.int32)
        return ByteTable(self.classes, numbers[self.targets[live]], self.accepting[live])
