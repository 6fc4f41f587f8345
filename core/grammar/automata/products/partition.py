"""partition: the equivalence classes of an automaton's states, by Moore's algorithm in compiled code."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from graftlm.core.grammar.automata.jit import Int32Array, loop

if TYPE_CHECKING:
    import numpy.typing as npt


def partition(targets: Int32Array, accepting: npt.NDArray[np.bool_], most: int) -> Int32Array | None:
    """The group of each state, int32 [num_states]: two states are in one if they accept the same texts.

    None where there are more than `most` groups, or where two hashes happened to be equal.

    targets    int32 [num_states, num_classes]: the next state
    accepting  bool [num_states]
    """
    groups = accepting.astype(np.int32)
    with np.errstate(over="ignore"):  # hashes wrap
        if _refine(np.ascontiguousarray(targets), groups, most) < 0:
            return None
    # groups are told apart by hashes: look whether all members of each do go on alike
    _, first, dense = np.unique(groups, return_index=True, return_inverse=True)
    ways = dense[targets]
    return groups if np.array_equal(ways, ways[first][dense]) else None


@loop("i8(i4[:,::1], i4[::1], i8)")
def _refine(targets: Int32Array, groups: Int32Array, most: int) -> int:
    """Split groups until their members go on alike. -> how many there are, -1 for more than `most`

    Each round looks only at states that lead to one which left its group in the round before. A state goes on as the
    hash of its targets' groups says, its `way`; members that are not looked at have the way `kept` of their group.

    targets  int32 [num_states, num_classes]
    groups   int32 [num_states]: 0 and 1 on entry, the groups on return
    """
    num_states, num_classes = targets.shape
    starts = np.zeros(num_states + 1, np.int64)  # of the states before each, in `before`
    for state in range(num_states):
        for c in range(num_classes):
            if c == 0 or targets[state, c] != targets[state, c - 1]:
                starts[targets[state, c] + 1] += 1
    for state in range(num_states):
        starts[state + 1] += starts[state]
    before, filled = np.empty(starts[num_states], np.int32), starts.copy()
    for state in range(num_states):
        for c in range(num_classes):
            if c == 0 or targets[state, c] != targets[state, c - 1]:
                before[filled[targets[state, c]]] = state
                filled[targets[state, c]] += 1
    room = 4
    while room < 4 * num_states:
        room *= 2
    slots = np.zeros(room, np.int32)  # a hash table of the parts of this round: their first members, from 1
    ways, kept = np.zeros(num_states, np.uint64), np.zeros(num_states + 2, np.uint64)
    sizes, looked_at = np.zeros(num_states + 2, np.int32), np.zeros(num_states + 2, np.int32)
    for state in range(num_states):
        sizes[groups[state]] += 1
    parts, part_sizes = np.empty(num_states, np.int32), np.empty(num_states, np.int32)
    largest, largest_way = np.zeros(num_states + 2, np.int32), np.zeros(num_states + 2, np.uint64)
    num_kept, instead = np.zeros(num_states + 2, np.int32), np.zeros(num_states + 2, np.int32)
    split = np.empty(num_states, np.int32)  # groups whose other members leave
    changed, changed_to = np.empty(num_states, np.int32), np.empty(num_states, np.int32)
    num_ids, num_groups = 2, (1 if sizes[0] > 0 else 0) + (1 if sizes[1] > 0 else 0)
    again, next_again = np.arange(num_states).astype(np.int32), np.empty(num_states, np.int32)
    is_looked_at, after = np.ones(num_states, np.bool_), np.empty(num_states, np.int32)
    num_again = num_states
    while num_again > 0:
        for i in range(num_again):
            state = again[i]
            looked_at[groups[state]] += 1
            way = np.uint64(0)
            for c in range(num_classes):
                way = (way ^ np.uint64(groups[targets[state, c]] + 1)) * np.uint64(0x9E3779B97F4A7C15)
                way ^= way >> np.uint64(29)
            ways[state] = way
        for i in range(num_again):  # members of one group with one way are a part, named by its first member
            group, way = groups[again[i]], ways[again[i]]
            slot = np.int64((way ^ np.uint64(group) * np.uint64(0xC2B2AE3D27D4EB4F)) >> np.uint64(20)) % room
            while slots[slot] > 0:
                j = slots[slot] - 1
                if groups[again[j]] == group and ways[again[j]] == way:
                    break
                slot = (slot + 1) % room
            if slots[slot] == 0:
                slots[slot] = i + 1
                part_sizes[i] = 0
            parts[i] = slots[slot] - 1
            part_sizes[parts[i]] += 1
        num_split = 0
        for i in range(num_again):
            group = groups[again[i]]
            if parts[i] == i and part_sizes[i] > largest[group]:
                largest[group], largest_way[group] = part_sizes[i], ways[again[i]]
            if parts[i] == i and ways[again[i]] == kept[group]:
                num_kept[group] = part_sizes[i]
        for i in range(
            num_again
        ):  # the largest part keeps the group's number; where it is not that of `kept`, others leave
            group = groups[again[i]]
            others = sizes[group] - looked_at[group]
            if largest[group] > 0 and (others == 0 or others + num_kept[group] < largest[group]):
                if others > 0:
                    split[num_split] = group
                    num_split += 1
                    kept[num_ids] = kept[group]
                    instead[group] = num_ids
                    num_ids += 1
                    num_groups += 1
                kept[group] = largest_way[group]
            largest[group] = 0
        for i in range(num_again):
            group, way = groups[again[i]], ways[again[i]]
            if way == kept[group]:
                after[i] = group
            elif instead[group] > 0 and way == kept[instead[group]]:
                after[i] = instead[group]
            elif parts[i] == i:
                after[i] = num_ids
                kept[num_ids] = way
                num_ids += 1
                num_groups += 1
            else:
                after[i] = after[parts[i]]
        slots[:] = 0
        num_changed = 0
        if num_split > 0:
            for state in range(num_states):
                if instead[groups[state]] > 0 and not is_looked_at[state]:
                    changed[num_changed], changed_to[num_changed] = state, instead[groups[state]]
                    num_changed += 1
        for i in range(num_again):
            state = again[i]
            is_looked_at[state] = False
            looked_at[groups[state]] = num_kept[groups[state]] = 0
            if after[i] != groups[state]:
                changed[num_changed], changed_to[num_changed] = state, after[i]
                num_changed += 1
        for i in range(num_split):
            instead[split[i]] = 0
        num_next = 0
        for i in range(num_changed):
            state = changed[i]
            sizes[groups[state]] -= 1
            sizes[changed_to[i]] += 1
            groups[state] = changed_to[i]
            for k in range(starts[state], starts[state + 1]):
                if not is_looked_at[before[k]]:
                    is_looked_at[before[k]] = True
                    next_again[num_next] = before[k]
                    num_next += 1
        if num_groups > most:
            return -1
        again, next_again, num_again = next_again, again, num_next
    return num_groups
