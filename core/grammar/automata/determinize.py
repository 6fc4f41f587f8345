"""The subset construction (NFA to DFA), with counters: most of the time of compiling a constraint is spent here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from graftlm.core.grammar.automata.jit import Int32Array, inner, loop
from graftlm.core.grammar.automata.state_sets import Int64Array, intern, sort

if TYPE_CHECKING:
    import numpy.typing as npt

# what `explore` answers
DONE, GROW, PAUSE, CONFLICT = 0, 1, 2, 3

# fields of `control` beside those of the sets
NUM_ACTIONS, NEXT, CONFLICT_A, CONFLICT_B, GENERATION, WORK, NUM_EDGES, MAX_EDGES = range(2, 10)

# columns of an action: what a transition does to counters, and where it leads below, between and at the bounds
REGISTER, MINIMUM, MAXIMUM, TARGET, ZERO = 0, 1, 2, 3, 6
ACTION_WIDTH = 9
LOW, MID, TOP = 0, 1, 2

# columns of `loops`
LOOP_MINIMUM, LOOP_MAXIMUM, LOOP_REGISTER, LOOP_PARENT, LOOP_BODY, LOOP_EXIT = range(6)

STAYS, TICKS, ENTERS = 0, 1, 2  # how a place in a loop came to its count


@inner
def _close(
    stack: Int32Array,
    height: int,
    zone: int,
    tick: int,
    epsilon_ptr: Int32Array,
    epsilons: Int32Array,
    mark: Int32Array,
    region: Int32Array,
    relevant: Int32Array,
    edge_ptr: Int32Array,
    final: int,
    loops: Int32Array,
    seen: Int32Array,
    kinds: Int32Array,
    found: Int32Array,
    control: Int64Array,
) -> tuple[int, int]:
    """Follow epsilon edges from `stack[:height]` (state, kinds).

    With zone -1 ticks are not passed. -> number of states in `found`, and the loop that ticks: -1 none, -2 a conflict
    """
    generation = control[6] + 1
    control[6] = generation
    num_found, ticking = 0, -1
    while height > 0:
        height -= 1
        control[7] += 1
        state, kind = stack[height, 0], stack[height, 1]
        if seen[state] == generation:
            if (kinds[state] ^ kind) & relevant[state]:
                control[4] = control[5] = region[state]
                return 0, -2
            continue
        seen[state] = generation
        kinds[state] = kind
        loop = mark[state]
        if loop != 0:
            k = abs(loop) - 1
            shift = 2 * loops[k, 2]
            kind &= ~(3 << shift)
            if loop > 0:
                kind |= 2 << shift
                again, leave = True, loops[k, 0] == 0
            else:
                if zone < 0:
                    if ticking >= 0 and ticking != k:
                        control[4], control[5] = k, ticking
                        return 0, -2
                    ticking = k
                    continue
                if k != tick:
                    control[4], control[5] = k, tick
                    return 0, -2
                kind |= 1 << shift
                again, leave = zone != 2, zone != 0
            if again:
                stack[height, 0], stack[height, 1] = loops[k, 4], kind
                height += 1
            if leave:
                stack[height, 0], stack[height, 1] = loops[k, 5], kind
                height += 1
            continue
        if edge_ptr[state + 1] > edge_ptr[state] or state == final:
            found[num_found] = state
            num_found += 1
        for e in range(epsilon_ptr[state], epsilon_ptr[state + 1]):
            stack[height, 0], stack[height, 1] = epsilons[e], kind
            height += 1
    return num_found, ticking


@inner
def _owners(
    found: Int32Array,
    num_found: int,
    region: Int32Array,
    kinds: Int32Array,
    loops: Int32Array,
    owner: Int32Array,
    owner_kind: Int32Array,
    control: Int64Array,
) -> bool:
    """Which loop uses each register in a set of states; False when two loops or two counts would share one."""
    for r in range(len(owner)):
        owner[r], owner_kind[r] = -1, 0
    for i in range(num_found):
        state = found[i]
        k = region[state]
        while k >= 0:
            register = loops[k, 2]
            kind = (kinds[state] >> (2 * register)) & 3
            if owner[register] < 0:
                owner[register] = k
                owner_kind[register] = kind
            elif owner[register] != k or owner_kind[register] != kind:
                control[4], control[5] = k, owner[register]
                return False
            k = loops[k, 3]
    return True


@loop(
    "i8(i8, i8, i4[::1], i4[:,::1], i4[::1], i4[::1], i4[::1], i4[::1], i4[::1], i4[:,::1], i4[:,::1], b1[::1], "
    "i4[:,::1], i4[:,::1], i4[::1], i8[::1], i4[::1], i4[:,::1], i8[::1], i8[::1], i8, i8, i8)"
)
def explore(
    start: int,
    final: int,
    edge_ptr: Int32Array,
    edges: Int32Array,
    epsilon_ptr: Int32Array,
    epsilons: Int32Array,
    mark: Int32Array,
    region: Int32Array,
    relevant: Int32Array,
    loops: Int32Array,
    table: Int32Array,
    accepting: npt.NDArray[np.bool_],
    owners: Int32Array,
    actions: Int32Array,
    pool: Int32Array,
    set_ptr: Int64Array,
    slots: Int32Array,
    ways: Int32Array,
    way_ptr: Int64Array,
    control: Int64Array,
    budget: int,
    max_states: int,
    num_bytes: int,
) -> int:
    """Find the states reachable from state 1 and fill their rows.

    table       int32 [capacity, num_classes]: the next state, 0 for none; -(a) for action a
    actions     int32 [capacity, 9], from row 1: register (-1: none), minimum, maximum, three targets, three sets of
                registers to put to 0
    ways        int32 [num_ways, 2]: a class, and what the table has there: for each class from `num_bytes` on, and
                else where that changes; those of state q are rows way_ptr[q] to way_ptr[q + 1]
    budget      targets of edges and states on the way over epsilon edges that are looked at in one call, about
    max_states  PAUSE once there are more states than these
    -> DONE, GROW (make the arrays larger), PAUSE or CONFLICT (of the loops in `control`); call again after the first
    two and it goes on where it stopped.
    """
    num_nfa, num_classes, num_registers = len(mark), table.shape[1], owners.shape[1]
    found = np.empty(num_nfa, np.int32)
    seen, kinds = np.zeros(num_nfa, np.int32), np.zeros(num_nfa, np.int32)
    stack = np.empty((4 * num_nfa + len(epsilons) + len(edges) + 16, 2), np.int32)
    owner = np.full(num_registers, -1, np.int32)
    owner_kind = np.zeros(num_registers, np.int32)
    counts = len(loops) > 0
    alone = np.zeros(0 if counts else num_nfa, np.int32)  # the state for what one target leads to, once it is known
    keys = np.empty(256, np.int64)  # edges of a set in the order of their first classes
    active, before = np.empty(256, np.int32), np.empty(256, np.int32)
    fields = np.empty(9, np.int32)
    if control[0] == 1:
        stack[0, 0], stack[0, 1] = start, 0
        num_found, _ = _close(
            stack, 1, -1, -1, epsilon_ptr, epsilons, mark, region, relevant, edge_ptr, final, loops, seen, kinds, found,
            control,
        )  # fmt: skip
        if num_found == 0 and control[4] >= 0:
            return 3
        if not _owners(found, num_found, region, kinds, loops, owner, owner_kind, control):
            return 3
        if intern(found, num_found, final, owner, accepting, owners, pool, set_ptr, slots, control) < 0:
            return 1
    control[7] = 0
    while control[3] < control[0]:
        if control[7] >= budget or control[0] - 1 > max_states or control[8] > control[9]:
            return 2
        state = control[3]
        first_action = control[2]
        num_ways = way_ptr[state]
        if num_ways + num_classes > len(ways):
            return 1
        num_keys, is_sorted = 0, True
        for i in range(set_ptr[state], set_ptr[state + 1]):
            for e in range(edge_ptr[pool[i]], edge_ptr[pool[i] + 1]):
                if num_keys == len(keys):
                    longer = np.empty(2 * num_keys, np.int64)
                    longer[:num_keys] = keys
                    keys, active, before = longer, np.empty(2 * num_keys, np.int32), np.empty(2 * num_keys, np.int32)
                keys[num_keys] = (np.int64(edges[e, 0]) << 32) | e
                is_sorted = is_sorted and (num_keys == 0 or keys[num_keys - 1] < keys[num_keys])
                num_keys += 1
        if not is_sorted:
            sort(keys, num_keys)
        control[7] += num_keys + 1
        control[8] += num_keys + 1
        # over the classes: `active` are the edges of those from `low` to `high`, in the order of their numbers
        low, num_active, num_before, read, value = 0, 0, 0, 0, 0
        while num_active > 0 or read < num_keys:
            if num_active == 0:
                first = keys[read] >> 32
                for c in range(low, first):
                    table[state, c] = 0
                low = first
            while read < num_keys and keys[read] >> 32 == low:
                e, i = keys[read] & 0xFFFFFFFF, num_active
                while i > 0 and active[i - 1] > e:
                    active[i] = active[i - 1]
                    i -= 1
                active[i] = e
                num_active += 1
                read += 1
            high = num_classes - 1
            if read < num_keys:
                high = (keys[read] >> 32) - 1
            for i in range(num_active):
                high = min(high, edges[active[i], 1])
            control[7] += num_active
            control[8] += num_active
            same = num_active == num_before
            if same:
                for i in range(num_active):
                    if edges[active[i], 2] != edges[before[i], 2]:
                        same = False
                        break
            if not same:
                for i in range(num_active):
                    before[i] = active[i]
                num_before = num_active
                for i in range(num_active):
                    stack[i, 0], stack[i, 1] = edges[active[i], 2], 0
                if not counts and num_active == 1 and alone[stack[0, 0]] != 0:
                    value = alone[stack[0, 0]]
                elif not counts:  # what `_close` does, which takes longer to call
                    control[6] += 1
                    num_found, height = 0, num_active
                    while height > 0:
                        height -= 1
                        control[7] += 1
                        target = stack[height, 0]
                        if seen[target] != control[6]:
                            seen[target] = control[6]
                            if edge_ptr[target + 1] > edge_ptr[target] or target == final:
                                found[num_found] = target
                                num_found += 1
                            for e in range(epsilon_ptr[target], epsilon_ptr[target + 1]):
                                stack[height, 0] = epsilons[e]
                                height += 1
                    value = intern(found, num_found, final, owner, accepting, owners, pool, set_ptr, slots, control)
                    if value < 0:
                        return 1
                    if num_active == 1:
                        alone[edges[active[0], 2]] = value
                else:
                    num_found, tick = _close(
                        stack, num_active, -1, -1, epsilon_ptr, epsilons, mark, region, relevant, edge_ptr, final,
                        loops, seen, kinds, found, control,
                    )  # fmt: skip
                    if tick == -2:
                        return 3
                    for i in range(9):
                        fields[i] = 0
                    fields[0] = -1
                    special = tick >= 0
                    low_zone, high_zone = 1, 1
                    if special:
                        minimum, maximum = loops[tick, 0], loops[tick, 1]
                        fields[0], fields[1], fields[2] = loops[tick, 2], minimum, maximum
                        low_zone = 0 if minimum >= 2 else 1
                        high_zone = 2 if maximum >= 0 else 1
                    for zone in range(low_zone, high_zone + 1):
                        if special:
                            if zone == 1 and maximum >= 0 and not (minimum < maximum and maximum >= 2):
                                continue
                            for i in range(num_active):
                                stack[i, 0], stack[i, 1] = edges[active[i], 2], 0
                            num_found, failed = _close(
                                stack, num_active, zone, tick, epsilon_ptr, epsilons, mark, region, relevant, edge_ptr,
                                final, loops, seen, kinds, found, control,
                            )  # fmt: skip
                            if failed == -2:
                                return 3
                        if not _owners(found, num_found, region, kinds, loops, owner, owner_kind, control):
                            return 3
                        target = intern(
                            found, num_found, final, owner, accepting, owners, pool, set_ptr, slots, control
                        )
                        if target < 0:
                            control[2] = first_action
                            return 1
                        zero = 0
                        for r in range(len(owner)):
                            if owners[state, r] >= 0 and (owner[r] < 0 or owner_kind[r] == 2):
                                zero |= 1 << r
                        fields[3 + zone] = target
                        fields[6 + zone] = zero
                    if not special and fields[7] == 0:
                        value = fields[4]
                    else:
                        action = -1
                        for a in range(first_action, control[2]):
                            equal = True
                            for i in range(9):
                                if actions[a, i] != fields[i]:
                                    equal = False
                                    break
                            if equal:
                                action = a
                                break
                        if action < 0:
                            action = control[2]
                            if action >= len(actions):
                                control[2] = first_action
                                return 1
                            for i in range(9):
                                actions[action, i] = fields[i]
                            control[2] = action + 1
                        value = -action
            for c in range(low, high + 1):
                table[state, c] = value
            if low >= num_bytes or num_ways == way_ptr[state] or ways[num_ways - 1, 1] != value:
                ways[num_ways, 0], ways[num_ways, 1] = low, value
                num_ways += 1
            low = high + 1
            kept = 0
            for i in range(num_active):
                if edges[active[i], 1] >= low:
                    active[kept] = active[i]
                    kept += 1
            num_active = kept
        for c in range(low, num_classes):
            table[state, c] = 0
        way_ptr[state + 1] = num_ways
        control[3] += 1
    return 0
