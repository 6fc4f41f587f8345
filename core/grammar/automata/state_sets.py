"""Sets of NFA states, each of which is one state of the deterministic automaton: kept in one array, found by hash."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from graftlm.core.grammar.automata.jit import Int32Array, inner, loop

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Int64Array: TypeAlias = "npt.NDArray[np.int64]"

NUM_STATES, POOL_USED = 0, 1
"""Fields of `control` that say how much is in use."""


@inner
def sort(values: Int32Array | Int64Array, count: int) -> None:
    """Sort the first `count` values (shell sort: short to compile, and sets are small)."""
    gap = 1
    while gap < count:
        gap = 3 * gap + 1
    while gap > 0:
        for i in range(gap, count):
            value = values[i]
            j = i
            while j >= gap and values[j - gap] > value:
                values[j] = values[j - gap]
                j -= gap
            values[j] = value
        gap //= 3


@inner
def intern(
    found: Int32Array,
    num_found: int,
    final: int,
    owner: Int32Array,
    accepting: npt.NDArray[np.bool_],
    owners: Int32Array,
    pool: Int32Array,
    set_ptr: Int64Array,
    slots: Int32Array,
    control: Int64Array,
) -> int:
    """The number of the state that stands for a set; -1 when the arrays are full."""
    sort(found, num_found)
    value = int(num_found)
    for i in range(num_found):
        value = ((value * 1000003) ^ int(found[i])) & 0x7FFFFFFF
    size = len(slots) - 1
    slot = (value ^ (value >> 15)) & size
    while slots[slot] != 0:
        state = slots[slot]
        start = set_ptr[state]
        if set_ptr[state + 1] - start == num_found:
            same = True
            for i in range(num_found):
                if pool[start + i] != found[i]:
                    same = False
                    break
            if same:
                return int(state)
        slot = (slot + 1) & size
    state, used = control[NUM_STATES], control[POOL_USED]
    if state + 1 >= len(accepting) or used + num_found > len(pool):
        return -1
    is_final = False
    for i in range(num_found):
        pool[used + i] = found[i]
        if found[i] == final:
            is_final = True
    slots[slot] = state
    accepting[state] = is_final
    for r in range(len(owner)):
        owners[state, r] = owner[r]
    set_ptr[state + 1] = used + num_found
    control[NUM_STATES], control[POOL_USED] = state + 1, used + num_found
    return int(state)


@loop("void(i4[::1], i8[::1], i8, i4[::1])")
def rehash(pool: Int32Array, set_ptr: Int64Array, num_states: int, slots: Int32Array) -> None:
    """Enter all states into a new, empty table."""
    size = len(slots) - 1
    for state in range(1, num_states):
        start, length = set_ptr[state], set_ptr[state + 1] - set_ptr[state]
        value = int(length)
        for i in range(length):
            value = ((value * 1000003) ^ int(pool[start + i])) & 0x7FFFFFFF
        slot = (value ^ (value >> 15)) & size
        while slots[slot] != 0:
            slot = (slot + 1) & size
        slots[slot] = state
