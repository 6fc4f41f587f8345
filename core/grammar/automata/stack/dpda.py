"""A deterministic pushdown automaton: for JSON of any depth, and what contains itself.

A rule that contains itself is called: the state to go on with lies on a stack until the rule has ended. One byte tells
what to do, since values of JSON begin and end with bytes of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from graftlm.core.grammar.automata.determinize import ACTION_WIDTH
from graftlm.core.grammar.automata.dfa import Place
from graftlm.core.grammar.automata.jit import Int32Array
from graftlm.core.grammar.automata.state_table import LONGEST_RUN, StateTable

if TYPE_CHECKING:
    import numpy.typing as npt

_NO_ACTIONS = np.zeros((1, ACTION_WIDTH), np.int32)


@dataclass(frozen=True, eq=False)
class Dpda(StateTable):
    """States over classes of bytes, and calls. A place is the state, then the states to go on with, innermost first.

    classes    uint8 [256], class of each byte
    table      int32 [num_states, num_classes]: next state, 0 for none, -c for row c of `calls`, to be entered with the
               same byte
    accepting  bool [num_states]: the rule may end
    calls      int32 [num_calls, 2]: the first state of a rule, and the state to go on with after it
    distance   int32 [num_states]: fewest bytes to the end of the rule
    begin      the first state of a text
    """

    calls: Int32Array
    distance: Int32Array
    begin: int

    @property
    def moves(self) -> tuple[Int32Array, npt.NDArray[np.uint8], Int32Array]:
        """`table`, `classes`, and no actions: what is negative is a call."""
        return self.table, self.classes, _NO_ACTIONS

    @cached_property
    def returns(self) -> npt.NDArray[np.bool_]:
        return self.accepting

    @property
    def start(self) -> Place:
        return (self.begin,)

    @cached_property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in (self.table, self.accepting, self.calls, self.distance, self.classes))

    def walk(self, place: Place, data: bytes) -> Place | None:
        """The place after `data`, or None when it is not allowed."""
        flat, width, class_of, calls = self._flat, self._width, self._class_of, self._calls
        state, stack = place[0], list(place[:0:-1])
        for byte in data:
            byte_class = class_of[byte]
            while True:
                target = flat[state * width + byte_class]
                if target > 0:
                    state = target
                    break
                if target < 0:
                    state, after = calls[-target]
                    stack.append(after)
                elif stack and self._ends[state]:
                    state = stack.pop()
                else:
                    return None
        while stack and self._is_over(state):
            state = stack.pop()
        return (state, *stack[::-1])

    def run(self, place: Place) -> tuple[bytes, Place]:
        """The bytes that must follow, and where they lead."""
        flat, width, class_of, singles = self._flat, self._width, self._class_of, self._singles
        data = bytearray()
        state, stack = place[0], place[1:]
        while (byte := singles[state]) >= 0 and len(data) < LONGEST_RUN:
            target = flat[state * width + class_of[byte]]
            if target < 0 or (stack and self._is_over(target)):  # a rule begins or ends
                after = self.walk((state, *stack), bytes((byte,)))
                assert after is not None
                state, stack = after[0], after[1:]
            else:
                state = target
            data.append(byte)
        return bytes(data), (state, *stack)

    def accepts(self, place: Place) -> bool:
        """Whether the text may end here: every rule that was called may."""
        ends = self._ends
        return all(ends[state] for state in place)

    def is_final(self, place: Place) -> bool:
        """Whether nothing can follow."""
        return len(place) == 1 and self._is_over(place[0])

    def ending_bound(self, place: Place) -> int:
        """Bytes of the shortest way to an end of the text."""
        distances = self._distances
        return sum([distances[state] for state in place])

    def ending(self, place: Place) -> bytes:
        """The fewest bytes that lead from `place` to an end of the text."""
        data = bytearray()
        state, stack = place[0], list(place[:0:-1])
        while True:
            if self.distance[state] == 0:
                if not stack:
                    return bytes(data)
                state = stack.pop()
                continue
            byte, called, after = self._nearest(state)
            if called:
                stack.append(after)
                state = called
            else:
                data.append(byte)
                state = after

    def _nearest(self, state: int) -> tuple[int, int, int]:
        """On the shortest way from `state`: its byte, the first state of the rule it calls or 0, and the next state."""
        distances, width = self._distances, self._width
        found, fewest = (0, 0, 0), -1
        for byte_class, target in enumerate(self._flat[state * width : (state + 1) * width].tolist()):
            if target:
                called, after = self._calls[-target] if target < 0 else (0, target)
                left = (distances[called] if called else 1) + distances[after]
                if left < fewest or fewest < 0:
                    found, fewest = (self.first_bytes[byte_class], called, after), left
        return found

    @cached_property
    def _ends(self) -> bytes:
        return self.accepting.tobytes()

    def _is_over(self, state: int) -> bool:
        """Whether a rule ends here, and cannot go on."""
        return bool(self._ends[state]) and not self.degree(state)

    @cached_property
    def _calls(self) -> tuple[tuple[int, ...], ...]:
        return tuple(map(tuple, self.calls.tolist()))

    @cached_property
    def _distances(self) -> memoryview[int]:
        return self.distance.data
