"""run_starts: the states at which forced texts begin. One byte goes on from them, and several from a state before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from graftlm.core.grammar.automata.dfa import Dfa
from graftlm.core.grammar.automata.jit import Int32Array, inner, loop

if TYPE_CHECKING:
    import numpy.typing as npt

    from graftlm.core.grammar.automata.stack.dpda import Dpda

_TOKEN_BYTES = 2
"""A token that ends a value mostly reads so many bytes of what follows at most, as `",` and `","` do."""


def run_starts(automaton: Dfa | Dpda) -> list[int]:
    """The states, in ascending order, with those that follow within a token; those of a stack automaton without a
    stack.
    """
    effects = automaton.actions[:, 3:6] if isinstance(automaton, Dfa) else automaton.calls[:, 1:2]
    singles = np.array(automaton.singles, np.int16)
    marks = np.zeros(automaton.num_states, np.uint8)
    are_calls = not isinstance(automaton, Dfa)
    begin = automaton.start[0]
    _mark(automaton.table, automaton.classes, singles, np.ascontiguousarray(effects), are_calls, begin, marks)
    found: list[int] = np.flatnonzero(marks).tolist()
    return found


@loop("void(i4[:,::1], u1[::1], i2[::1], i4[:,::1], b1, i8, u1[::1])")
def _mark(
    table: Int32Array,
    classes: npt.NDArray[np.uint8],
    singles: npt.NDArray[np.int16],
    effects: Int32Array,
    are_calls: bool,
    begin: int,
    marks: npt.NDArray[np.uint8],
) -> None:
    """Set `marks` of the states.

    effects    int32 [num, width]: where a negative target leads, 0 for nowhere
    are_calls  whether these are the states after a rule
    """
    seen = np.zeros(len(table), np.uint8)
    stack = np.empty(len(table), np.int32)
    stack[0], height = begin, 1
    seen[begin] = 1
    if singles[begin] >= 0:
        marks[begin] = 1
    while height > 0:
        height -= 1
        state = stack[height]
        for c in range(table.shape[1]):
            target = table[state, c]
            for k in range(effects.shape[1] if target < 0 else 1):
                after = effects[-target, k] if target < 0 else target
                if after <= 0:
                    continue
                if singles[state] < 0 or target < 0 and are_calls:
                    _mark_run(table, classes, singles, after, marks)
                if seen[after] == 0:
                    seen[after] = 1
                    stack[height] = after
                    height += 1


@inner
def _mark_run(
    table: Int32Array,
    classes: npt.NDArray[np.uint8],
    singles: npt.NDArray[np.int16],
    state: int,
    marks: npt.NDArray[np.uint8],
) -> None:
    for _ in range(1 + _TOKEN_BYTES):
        if state <= 0 or singles[state] < 0:
            break
        marks[state] = 1
        state = table[state, classes[singles[state]]]
