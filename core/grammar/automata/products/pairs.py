"""Two automata walked side by side, state by state: the loop under products of languages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from graftlm.core.grammar.automata.jit import Int32Array, loop

if TYPE_CHECKING:
    import numpy.typing as npt

# what `walk` answers
DONE, GROW, PAUSE, FOUND = 0, 1, 2, 3

# fields of `control`
NUM_PAIRS, NEXT = 0, 1


@loop(
    "i8(i4[:,::1], i4[:,::1], i8[::1], i8[::1], b1[::1], b1[::1], b1, b1, i4[:,::1], i4[:,::1], i4[::1], i8[::1], i8)"
)
def walk(
    left: Int32Array,
    right: Int32Array,
    in_left: npt.NDArray[np.int64],
    in_right: npt.NDArray[np.int64],
    ends_left: npt.NDArray[np.bool_],
    ends_right: npt.NDArray[np.bool_],
    is_both: bool,
    stops: bool,
    pairs: Int32Array,
    rows: Int32Array,
    slots: Int32Array,
    control: npt.NDArray[np.int64],
    budget: int,
) -> int:
    """Number the pairs of states reachable from pair 1, at most `budget` of them in one call, and fill their rows.

    left, right    int32 [num_states, num_classes]: the next state, 0 for none
    in_left, ...   int64 [num_joint]: the class of `left` that each joint class lies in
    is_both        a text has to be in both languages; else in the left one and not in the right one
    stops          stop at the first pair in which such a text may end
    pairs          int32 [capacity, 2], the first two rows filled; rows int32 [capacity, num_joint], 0 for none
    slots          int32, a power of two larger than twice the capacity
    -> DONE, GROW (make `pairs` and `rows` larger), PAUSE or FOUND; call again after the first two of these three.
    """
    num_joint, size = len(in_left), len(slots) - 1
    done = 0
    while control[1] < control[0]:
        if done == budget:
            return 2
        if control[0] + num_joint > len(pairs):
            return 1
        done += 1
        pair = control[1]
        control[1] += 1
        a, b = pairs[pair, 0], pairs[pair, 1]
        if stops and ends_left[a] and ends_right[b] == is_both:
            return 3
        last_a, last_b, last = 0, 0, 0
        for c in range(num_joint):
            next_a, next_b = left[a, in_left[c]], right[b, in_right[c]]
            if next_a == 0 or (is_both and next_b == 0):
                rows[pair, c] = 0
                continue
            if next_a == last_a and next_b == last_b:
                rows[pair, c] = last
                continue
            value = ((int(next_a) * 1000003) ^ (int(next_b) * 8191)) & 0x7FFFFFFF
            slot = (value ^ (value >> 15)) & size
            while slots[slot] != 0:
                known = slots[slot]
                if pairs[known, 0] == next_a and pairs[known, 1] == next_b:
                    break
                slot = (slot + 1) & size
            if slots[slot] == 0:
                known = control[0]
                control[0] += 1
                pairs[known, 0], pairs[known, 1] = next_a, next_b
                slots[slot] = known
            last_a, last_b, last = next_a, next_b, slots[slot]
            rows[pair, c] = last
    return 0
