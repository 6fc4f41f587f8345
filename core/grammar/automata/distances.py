"""How far the states of an automaton are from the end of a text."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from graftlm.core.grammar.automata.jit import Int32Array, loop
from graftlm.core.grammar.automata.state_sets import Int64Array

Ways: TypeAlias = tuple[Int64Array, Int32Array]
"""The transitions of all states: where those of each state begin, int64 [num_states + 1]; and the class and the table's
entry of each transition, int32 [num_ways, 2].
"""


@loop("Tuple((i8[::1], i4[:,::1]))(i4[:,::1])")
def list_ways(table: Int32Array) -> Ways:
    """The ways of a table: for each state the first of all neighbouring classes with one target."""
    num_states, num_classes = table.shape
    way_ptr, ways = np.zeros(num_states + 1, np.int64), np.empty((0, 2), np.int32)
    for filling in range(2):
        num_ways = 0
        for state in range(num_states):
            previous = 0
            for c in range(num_classes):
                if table[state, c] != previous:
                    previous = table[state, c]
                    if previous != 0:
                        if filling:
                            ways[num_ways, 0], ways[num_ways, 1] = c, previous
                        num_ways += 1
            way_ptr[state + 1] = num_ways
        if not filling:
            ways = np.empty((num_ways, 2), np.int32)
    return way_ptr, ways


@loop("void(i8[::1], i4[:,::1], i4[:,::1], i4[::1])")
def measure(way_ptr: Int64Array, ways: Int32Array, actions: Int32Array, distance: Int32Array) -> None:
    """Fill `distance`, 0 where the text may end and far elsewhere, with the fewest bytes to such a state.

    Breadth first over the transitions backwards. Every target of an action counts as open.
    """
    far = 2147483647
    num_states = len(distance)
    begins = np.zeros(num_states + 2, np.int32)
    sources = np.empty(0, np.int32)
    for filling in range(2):  # count the ways to each state, then list where they come from
        for state in range(1, num_states):
            for i in range(way_ptr[state], way_ptr[state + 1]):
                target = ways[i, 1]
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
