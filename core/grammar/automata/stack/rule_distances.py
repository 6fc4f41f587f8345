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
    for state in range(2, num_states):
        for i in range(way_ptr[state], way_ptr[state + 1]):
            if ways[i, 0] == last_class:
                accepting[state], distance[state] = True, 0
    queue = np.empty(num_states, np.int32)
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
                if ways[i, 0] != last_class and rule[target] < 0:
                    rule[target] = r
                    queue[last] = target
                    last += 1
    changed = True
    while changed:
        changed = False
        for at in range(last - 1, -1, -1):
            state = queue[at]
            best = distance[state]
            for i in range(way_ptr[state], way_ptr[state + 1]):
                left = distance[ways[i, 1]]
                if left == far or ways[i, 0] == last_class:
                    continue
                step = 1 if ways[i, 0] < num_bytes else distance[entries[ways[i, 0] - num_bytes + 1]]
                if step != far and left + step < best:
                    best = left + step
            if best < distance[state]:
                distance[state] = best
                changed = True
    num_dead = 0
    for at in range(last):
        num_dead += distance[queue[at]] == far
    return num_dead
