"""Whether two ways on at one place of a pushdown automaton stay two, however often a rule is written out there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from graftlm.core.grammar.automata.jit import Int32Array, inner, loop
from graftlm.core.grammar.automata.stack.call_sites import first_bytes

if TYPE_CHECKING:
    import numpy.typing as npt

    BoolArray = npt.NDArray[np.bool_]

MAX_PAIRS = 2048
_NUM_SLOTS = 8192


@inner
def _put(first: int, second: int, pairs: Int32Array, slots: Int32Array, num_pairs: int) -> int:
    """Add a pair that is not among `pairs`, as far as there is room. -> how many there are"""
    slot = (first * 40503 + second * 30011) & (len(slots) - 1)
    while slots[slot] != 0:
        known = slots[slot] - 1
        if pairs[known, 0] == first and pairs[known, 1] == second:
            return num_pairs
        slot = (slot + 1) & (len(slots) - 1)
    if num_pairs < len(pairs):
        pairs[num_pairs, 0], pairs[num_pairs, 1] = first, second
        num_pairs += 1
        slots[slot] = num_pairs
    return num_pairs


@loop("b1(i4[:,::1], i4[::1], i4[::1], b1[::1])")
def stays(table: Int32Array, entries: Int32Array, rule: Int32Array, faults: BoolArray) -> bool:
    """Whether a rule in `faults` meets, inside itself, bytes that go on beside it where it is called.

    Written out, it is called inside itself all the same, and one byte does not tell it from those: that is so for
    values beside values of any kind, which nest as deep. False where the first MAX_PAIRS pairs of states show none.

    table    int32 [num_states, num_bytes + num_rules + 1]: as for `place_calls`
    entries  int32 [num_rules + 1]: where the whole text and each rule begin
    rule     int32 [num_states]: whose state it is, by its place in `entries`; -1 for none
    faults   bool [num_rules]: rules to be written out; none may be empty
    """
    num_rules, num_states = len(entries) - 1, len(table)
    num_bytes = table.shape[1] - num_rules - 1
    firsts = first_bytes(table, entries)
    # pairs of a state of a rule, once that is written out, and one that the same text leads to beside it
    pairs = np.zeros((MAX_PAIRS, 2), np.int32)
    slots = np.zeros(_NUM_SLOTS, np.int32)
    num_pairs, at = 0, 0
    for r in range(num_rules):
        if not faults[r]:
            continue
        entry = entries[r + 1]
        for state in range(2, num_states):
            if table[state, num_bytes + r] == 0:
                continue
            for other in range(-1, num_rules):  # bytes of the state itself, and those of rules that it calls as well
                begin = state
                if other >= 0:
                    if other == r or table[state, num_bytes + other] == 0:
                        continue
                    begin = entries[other + 1]
                for c in range(num_bytes):
                    if table[entry, c] != 0 and table[begin, c] != 0:
                        num_pairs = _put(table[entry, c], table[begin, c], pairs, slots, num_pairs)
    while at < num_pairs:
        within, beside = pairs[at, 0], pairs[at, 1]
        at += 1
        r = rule[within] - 1
        for i in range(num_rules):
            after = table[within, num_bytes + i]
            if after == 0:
                continue
            after_beside = table[beside, num_bytes + i]
            if i == r:
                if after_beside != 0 and rule[beside] != r + 1:
                    return True  # there it is written out
                for c in range(num_bytes):
                    if firsts[r, c] and table[beside, c] != 0:
                        return True
            if after_beside != 0:
                num_pairs = _put(after, after_beside, pairs, slots, num_pairs)
        for c in range(num_bytes):
            if table[within, c] != 0 and table[beside, c] != 0:
                num_pairs = _put(table[within, c], table[beside, c], pairs, slots, num_pairs)
    return False
