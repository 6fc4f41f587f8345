"""How far the states of an automaton are from the end of a text."""

from __future__ import annotations

import numpy as np

from graftlm.core.grammar.automata.jit import Int32Array, loop


@loop("void(i4[:,::1], i4[:,::1], i4[::1])")
def measure(table: Int32Array, actions: Int32Array, distance: Int32Array) -> None:
    """Fill `distance`, 0 where the text may end and far elsewhere, with the fewest bytes to such a state.

    Breadth first over the transitions backwards. Every target of an action counts as open.
    """
    far = 2147483647
    num_states, num_classes = table.shape
    begins = np.zeros(num_states + 2, np.int32)
    sources = np.empty(0, np.int32)
    for filling in range(2):  # count the ways to each state, then list where they come from
        for state in range(1, num_states):
            previous = 0
            for c in range(num_classes):
                target = table[state, c]
                if target == previous:
                    continue
                previous = target
                if target > 0:
                    if filling:
                        sources[begins[target + 1]] = state
                    begins[target + 1] += 1
                elif target < 0:
                    for zone in range(3, 6):
                        after = actions[-target, zone]
                        if after > 0:
                            if filling:
                                sources[begins[after + 1]] = state
                            begins[after + 1] += 1
        if not filling:
            total = 0
            for state in range(num_states + 2):
                count = begins[state]
                begins[state] = total
                total += count
            sources = np.empty(total, np.int32)
    # begins[state + 1] is now where the sources of `state` end, and begins[state] where they begin
    queue = np.empty(num_states, np.int32)
    first, last = 0, 0
    for state in range(1, num_states):
        if distance[state] == 0:
            queue[last] = state
            last += 1
    while first < last:
        state = queue[first]
        first += 1
        for i in range(begins[state], begins[state + 1]):
            source = sources[i]
            if distance[source] == far:
                distance[source] = distance[state] + 1
                queue[last] = source
                last += 1
