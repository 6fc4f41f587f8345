"""How far the states of a pushdown automaton are from the end of their rule, and which rule each belongs to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from graftlm.core.grammar.automata.jit import Int32Array, loop
from graftlm.core.grammar.automata.state_sets import Int64Array

if TYPE_CHECKING:
    import numpy.typing as npt


@loop("i8(i8[::1], i4[:,::1], i8, i4[::1], b1[::1], i4[::1], i4[::1])")
def measure_rules(
    way_ptr: Int64Array,
    ways: Int32Array,
    num_bytes: int,
    entries: Int32Array,
    accepting: npt.NDArray[np.bool_],
    distance: Int32Array,
    rule: Int32Array,
) -> int:
    """Fill the last four arrays.

    way_ptr    int64 [num_states + 1]: where the ways of each state begin
    ways       int32 [num_ways, 2]: a class of bytes, from `num_bytes` on the end of a rule that is called, and last the
               end of the rule itself; and the state that follows. State 1 only leads to the rules
    entries    int32 [num_rules + 1]: where the whole text and each rule begin
    accepting  bool [num_states]: the rule of the state may end
    distance   int32 [num_states]: fewest bytes to the end of the rule, those of the rules it calls among them
    rule       int32 [num_states]: whose state it is, by its place in `entries`; -1 for none

    -> how many states of rules lead to no end
    """
    far = 2147483647
    num_states, num_rules = len(distance), len(entries) - 1
    last_class = num_bytes + num_rules
    distance[:], rule[:], accepting[:] = far, -1, False
    for i in range(way_ptr[1], way_ptr[2]):
        entries[0 if ways[i, 0] == last_class else ways[i, 0] - num_bytes + 1] = ways[i, 1]
    queue = np.empty(num_states, np.int32)
    begins = np.zeros(num_states + 2, np.int32)  # at first, of each state, how many ways depend on its distance
    first, last = 0, 0
    for r in range(num_rules + 1):
        if rule[entries[r]] < 0:
            rule[entries[r]] = r
            queue[last] = entries[r]
            last += 1
        while first < last:
            state = queue[first]
            first += 1
            for i in range(way_ptr[state], way_ptr[state + 1]):
                target = ways[i, 1]
                if ways[i, 0] == last_class:
                    accepting[state], distance[state] = True, 0
                    continue
                begins[target + 2] += 1
                if ways[i, 0] >= num_bytes:
                    begins[entries[ways[i, 0] - num_bytes + 1] + 2] += 1
                if rule[target] < 0:
                    rule[target] = r
                    queue[last] = target
                    last += 1
    for state in range(2, num_states + 2):
        begins[state] += begins[state - 1]
    dependents = np.empty((begins[num_states + 1], 2), np.int32)  # such ways, and the states that have them
    work, is_waiting = np.empty(num_states, np.int32), np.zeros(num_states, np.bool_)
    head, num_waiting = 0, 0
    for at in range(last):
        state = queue[at]
        for i in range(way_ptr[state], way_ptr[state + 1]):
            if ways[i, 0] == last_class:
                work[num_waiting], is_waiting[state] = state, True
                num_waiting += 1
                continue
            target = ways[i, 1]
            dependents[begins[target + 1], 0], dependents[begins[target + 1], 1] = i, state
            begins[target + 1] += 1
            if ways[i, 0] >= num_bytes:
                target = entries[ways[i, 0] - num_bytes + 1]
                dependents[begins[target + 1], 0], dependents[begins[target + 1], 1] = i, state
                begins[target + 1] += 1
    # the work is a ring of states whose distance fell since it was passed on
    while num_waiting > 0:
        state = work[head]
        head = (head + 1) % num_states
        num_waiting -= 1
        is_waiting[state] = False
        for k in range(begins[state], begins[state + 1]):
            i, source = dependents[k, 0], dependents[k, 1]
            left = distance[ways[i, 1]]
            step = 1 if ways[i, 0] < num_bytes else distance[entries[ways[i, 0] - num_bytes + 1]]
            if left == far or step == far or left + step >= distance[source]:
                continue
            distance[source] = left + step
            if not is_waiting[source]:
                is_waiting[source] = True
                work[(head + num_waiting) % num_states] = source
                num_waiting += 1
    num_dead = 0
    for at in range(last):
        num_dead += distance[queue[at]] == far
    return num_dead
