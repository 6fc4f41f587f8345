"""How far the states of a pushdown automaton are from the end of their rule, and which rule each belongs to."""

from __future__ import annotations

import numpy as np

from graftlm.core.grammar.automata.jit import Int32Array, loop


@loop("void(i4[:,::1], i8, i4[::1], i4[::1], i4[::1])")
def measure_rules(
    table: Int32Array, num_bytes: int, entries: Int32Array, distance: Int32Array, rule: Int32Array
) -> None:
    """Fill `distance`, 0 where a rule may end and far elsewhere, and `rule`, -1 everywhere.

    table      int32 [num_states, num_bytes + num_rules + 1]: the next state on a class of bytes, then after each rule;
               state 0 is none, state 1 only leads to the rules
    entries    int32 [num_rules + 1]: where the whole text and each rule begin
    distance   int32 [num_states]: fewest bytes to the end of the rule, those of the rules it calls among them
    rule       int32 [num_states]: whose state it is, by its place in `entries`
    """
    far = 2147483647
    num_states, num_classes = table.shape[0], table.shape[1] - 1
    queue = np.empty(num_states, np.int32)
    # the ways on from each state in the order of the queue: where to, and after which rule, 0 for a byte
    begins = np.zeros(num_states + 1, np.int32)
    ways = np.empty((4 * num_states + num_classes, 2), np.int32)
    last, used = 0, 0
    for r in range(len(entries)):
        first = last
        if rule[entries[r]] < 0:
            rule[entries[r]] = r
            queue[last] = entries[r]
            last += 1
        while first < last:
            state, previous = queue[first], 0
            if used + num_classes > len(ways):
                more = np.empty((2 * len(ways) + num_classes, 2), np.int32)
                more[:used] = ways[:used]
                ways = more
            for c in range(num_classes):
                target = table[state, c]
                if target != 0 and (c >= num_bytes or target != previous):
                    ways[used, 0], ways[used, 1] = target, max(0, c - num_bytes + 1)
                    used += 1
                    if rule[target] < 0:
                        rule[target] = r
                        queue[last] = target
                        last += 1
                previous = target
            first += 1
            begins[first] = used
    changed = True
    while changed:
        changed = False
        for i in range(last - 1, -1, -1):
            best = distance[queue[i]]
            for j in range(begins[i], begins[i + 1]):
                left = distance[ways[j, 0]]
                if left == far:
                    continue
                if ways[j, 1] > 0:
                    of_rule = distance[entries[ways[j, 1]]]
                    if of_rule == far:
                        continue
                    left += of_rule
                else:
                    left += 1
                if left < best:
                    best = left
            if best < distance[queue[i]]:
                distance[queue[i]] = best
                changed = True
