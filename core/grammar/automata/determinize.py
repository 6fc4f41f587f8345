"""The subset construction (NFA to DFA), with counters: most of the time of compiling a constraint is spent here."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from graftlm.core.grammar.automata.jit import Int32Array, inner, loop

if TYPE_CHECKING:
    import numpy.typing as npt

Int64Array: TypeAlias = "npt.NDArray[np.int64]"

# what `explore` answers
DONE, GROW, PAUSE, CONFLICT = 0, 1, 2, 3

# fields of `control`
NUM_STATES, POOL_USED, NUM_ACTIONS, NEXT, CONFLICT_A, CONFLICT_B, GENERATION, WORK = range(8)

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
    important: npt.NDArray[np.bool_],
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
        if important[state]:
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


@inner
def _sort(values: Int32Array, count: int) -> None:
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
def _intern(
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
    _sort(found, num_found)
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
    state, used = control[0], control[1]
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
    control[0], control[1] = state + 1, used + num_found
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


@loop(
    "i8(i8, i8, i4[::1], i4[:,::1], i4[::1], i4[::1], i4[::1], i4[::1], i4[::1], b1[::1], i4[:,::1], i4[:,::1], "
    "b1[::1], i4[:,::1], i4[:,::1], i4[::1], i8[::1], i4[::1], i4[::1], i4[::1], i8[::1], i8, i8)"
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
    important: npt.NDArray[np.bool_],
    loops: Int32Array,
    table: Int32Array,
    accepting: npt.NDArray[np.bool_],
    owners: Int32Array,
    actions: Int32Array,
    pool: Int32Array,
    set_ptr: Int64Array,
    slots: Int32Array,
    seen: Int32Array,
    kinds: Int32Array,
    control: Int64Array,
    budget: int,
    max_states: int,
) -> int:
    """Find the states reachable from state 1 and fill their rows.

    table       int32 [capacity, num_classes]: the next state, 0 for none; -(a) for action a
    actions     int32 [capacity, 9], from row 1: register (-1: none), minimum, maximum, three targets, three sets of
                registers to put to 0
    budget      targets of edges and states on the way over epsilon edges that are looked at in one call, about
    max_states  PAUSE once there are more states than these
    -> DONE, GROW (make the arrays larger), PAUSE or CONFLICT (of the loops in `control`); call again after the first
    two and it goes on where it stopped.
    """
    num_nfa, num_classes, num_registers = len(mark), table.shape[1], owners.shape[1]
    found = np.empty(num_nfa, np.int32)
    stack = np.empty((4 * num_nfa + len(epsilons) + len(edges) + 16, 2), np.int32)
    owner = np.full(num_registers, -1, np.int32)
    owner_kind = np.zeros(num_registers, np.int32)
    counts = len(loops) > 0
    alone = np.zeros(0 if counts else num_nfa, np.int32)  # the state for what one target leads to, once it is known
    bucket_ptr = np.empty(num_classes + 1, np.int64)
    bucket = np.empty(256, np.int32)
    fields = np.empty(9, np.int32)
    if control[0] == 1:
        stack[0, 0], stack[0, 1] = start, 0
        num_found, _ = _close(
            stack, 1, -1, -1, epsilon_ptr, epsilons, mark, region, relevant, important, loops, seen, kinds, found,
            control,
        )  # fmt: skip
        if num_found == 0 and control[4] >= 0:
            return 3
        if not _owners(found, num_found, region, kinds, loops, owner, owner_kind, control):
            return 3
        if _intern(found, num_found, final, owner, accepting, owners, pool, set_ptr, slots, control) < 0:
            return 1
    control[7] = 0
    while control[3] < control[0]:
        if control[7] >= budget or control[0] - 1 > max_states:
            return 2
        state = control[3]
        first_action = control[2]
        # sort the edges of the set into one bucket of targets per class
        low, high = num_classes, -1
        for i in range(set_ptr[state], set_ptr[state + 1]):
            for e in range(edge_ptr[pool[i]], edge_ptr[pool[i] + 1]):
                low, high = min(low, edges[e, 0]), max(high, edges[e, 1])
        for c in range(num_classes):
            table[state, c] = 0
        for c in range(low, high + 2):
            bucket_ptr[c] = 0
        for i in range(set_ptr[state], set_ptr[state + 1]):
            for e in range(edge_ptr[pool[i]], edge_ptr[pool[i] + 1]):
                for c in range(edges[e, 0], edges[e, 1] + 1):
                    bucket_ptr[c + 1] += 1
        for c in range(low, high + 1):
            bucket_ptr[c + 1] += bucket_ptr[c]
        if high >= 0 and bucket_ptr[high + 1] > len(bucket):
            bucket = np.empty(2 * bucket_ptr[high + 1], np.int32)
        for i in range(set_ptr[state], set_ptr[state + 1]):
            for e in range(edge_ptr[pool[i]], edge_ptr[pool[i] + 1]):
                for c in range(edges[e, 0], edges[e, 1] + 1):
                    bucket[bucket_ptr[c]] = edges[e, 2]
                    bucket_ptr[c] += 1
        control[7] += num_classes + (bucket_ptr[high] if high >= 0 else 0)
        begin = 0
        before = 0
        for c in range(low, high + 1):
            end = bucket_ptr[c]  # filling moved every pointer to the end of its bucket
            if begin == end:
                before = begin
                continue
            if c > low and end - begin == begin - before:
                same = True
                for i in range(end - begin):
                    if bucket[begin + i] != bucket[before + i]:
                        same = False
                        break
                if same:
                    table[state, c] = table[state, c - 1]
                    before, begin = begin, end
                    continue
            height = end - begin
            if not counts and height == 1 and alone[bucket[begin]] != 0:
                table[state, c] = alone[bucket[begin]]
                before, begin = begin, end
                continue
            for i in range(height):
                stack[i, 0], stack[i, 1] = bucket[begin + i], 0
            num_found, tick = _close(
                stack, height, -1, -1, epsilon_ptr, epsilons, mark, region, relevant, important, loops, seen, kinds,
                found, control,
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
                    for i in range(end - begin):
                        stack[i, 0], stack[i, 1] = bucket[begin + i], 0
                    num_found, failed = _close(
                        stack, end - begin, zone, tick, epsilon_ptr, epsilons, mark, region, relevant, important,
                        loops, seen, kinds, found, control,
                    )  # fmt: skip
                    if failed == -2:
                        return 3
                if counts and not _owners(found, num_found, region, kinds, loops, owner, owner_kind, control):
                    return 3
                target = _intern(found, num_found, final, owner, accepting, owners, pool, set_ptr, slots, control)
                if target < 0:
                    control[2] = first_action
                    return 1
                zero = 0
                for r in range(num_registers):
                    if owners[state, r] >= 0 and (owner[r] < 0 or owner_kind[r] == 2):
                        zero |= 1 << r
                fields[3 + zone] = target
                fields[6 + zone] = zero
            if not special and fields[7] == 0:
                table[state, c] = fields[4]
                if not counts and height == 1:
                    alone[bucket[begin]] = fields[4]
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
                table[state, c] = -action
            before, begin = begin, end
        control[3] += 1
    return 0
