"""forced_runs: the forced texts between two values, at the states where they begin: one byte goes on from there, and
several from a state before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from graftlm.core.grammar.automata.dfa import Dfa
from graftlm.core.grammar.automata.jit import Int32Array, inner, loop

if TYPE_CHECKING:
    import numpy.typing as npt

    from graftlm.core.grammar.automata.dfa import Place
    from graftlm.core.grammar.automata.stack.dpda import Dpda

_TOKEN_BYTES = 2
"""A token that ends a value mostly reads so many bytes of what follows at most, as `",` and `","` do."""
_UNKNOWN, _TOO_LONG = 0, -1
"""For the state after a text: some byte changes a counter or calls a rule; it has more bytes than were asked for."""


def forced_runs(automaton: Dfa | Dpda, max_runs: int, max_bytes: int) -> list[tuple[int, bytes, Place]]:
    """A state, the bytes that are forced there, and the place after them: `max_runs` of these, in ascending order.

    They are those where such texts begin, and those that follow within a token; of a stack automaton, without a stack,
    and of one with counters, while none runs. Texts of more than `max_bytes` bytes are left out.
    """
    is_stack = not isinstance(automaton, Dfa)
    effects = automaton.actions[:, 3:6] if isinstance(automaton, Dfa) else automaton.calls[:, 1:2]
    singles, begin, none = automaton.singles, automaton.start[0], automaton.start[1:]
    states, numbers = np.empty(max_runs, np.int32), np.empty((max_runs, 2), np.int32)
    data = np.empty(max_runs * max_bytes, np.uint8)
    num_runs = _find(
        automaton.table, automaton.classes, singles, np.ascontiguousarray(effects), is_stack, begin, max_bytes, states,
        numbers, data,
    )  # fmt: skip
    found: list[tuple[int, bytes, Place]] = []
    first = 0
    for state, (after, end) in zip(states[:num_runs].tolist(), numbers[:num_runs].tolist(), strict=True):
        if after == _UNKNOWN:
            text, place = automaton.run((state, *none))
            if place[1:] == none and len(text) <= max_bytes:
                found.append((state, text, place))
        elif after != _TOO_LONG:
            found.append((state, data[first:end].tobytes(), (after, *none)))
        first = end
    return found


@loop("i8(i4[:,::1], u1[::1], i2[::1], i4[:,::1], b1, i8, i8, i4[::1], i4[:,::1], u1[::1])")
def _find(
    table: Int32Array,
    classes: npt.NDArray[np.uint8],
    singles: npt.NDArray[np.int16],
    effects: Int32Array,
    are_calls: bool,
    begin: int,
    max_bytes: int,
    states: Int32Array,
    numbers: Int32Array,
    data: npt.NDArray[np.uint8],
) -> int:
    """Fill `states`; `numbers` with the state after each text, or why it is not known, and the end of its bytes in
    `data`.

    effects    int32 [num, width]: where a negative target leads, 0 for nowhere
    are_calls  whether these are the states after a rule
    -> how many there are, as far as there is room
    """
    marks, seen = np.zeros(len(table), np.uint8), np.zeros(len(table), np.uint8)
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
            if target == 0 or c > 0 and target == table[state, c - 1]:
                continue
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
    num_found, used = 0, 0
    for first in range(len(table)):
        if marks[first] == 0:
            continue
        if num_found == len(states):
            break
        end, state = used, first
        while state > 0 and singles[state] >= 0 and end - used < max_bytes:
            data[end] = singles[state]
            state = table[state, classes[singles[state]]]
            end += 1
        states[num_found] = first
        if state <= 0:
            state = _UNKNOWN
        elif singles[state] >= 0:
            state = _TOO_LONG
        else:
            used = end
        numbers[num_found, 0], numbers[num_found, 1] = state, used
        num_found += 1
    return num_found


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
