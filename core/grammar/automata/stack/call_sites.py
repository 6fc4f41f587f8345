"""The calls of a pushdown automaton: the states that call rules, and the bytes on which they do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from graftlm.core.grammar.automata.jit import Int32Array, inner, loop

if TYPE_CHECKING:
    import numpy.typing as npt

    BoolArray = npt.NDArray[np.bool_]


@inner
def first_bytes(table: Int32Array, entries: Int32Array) -> BoolArray:
    """bool [num_rules, num_bytes]: what each rule may begin with, the bytes of rules that it calls first among them."""
    num_rules = len(entries) - 1
    num_bytes = table.shape[1] - num_rules - 1
    firsts = np.zeros((num_rules, num_bytes), np.bool_)
    for r in range(num_rules):
        for c in range(num_bytes):
            firsts[r, c] = table[entries[r + 1], c] != 0
    changed = True
    while changed:
        changed = False
        for r in range(num_rules):
            for below in range(num_rules):
                if table[entries[r + 1], num_bytes + below] != 0:
                    for c in range(num_bytes):
                        if firsts[below, c] and not firsts[r, c]:
                            firsts[r, c] = changed = True
    return firsts


@loop("Tuple((i4[:,::1], i4[:,::1]))(i4[:,::1], b1[::1], i4[::1], i4[::1], b1[::1])")
def place_calls(
    table: Int32Array, accepting: BoolArray, entries: Int32Array, rule: Int32Array, faults: BoolArray
) -> tuple[Int32Array, Int32Array]:
    """The table with calls in place of rules: on each byte that the rule may begin with.

    table      int32 [num_states, num_bytes + num_rules + 1]: the next state on a class of bytes, then after each rule;
               state 0 is none, state 1 only leads to the rules
    accepting  bool [num_states]: the rule of the state may end
    entries    int32 [num_rules + 1]: where the whole text and each rule begin
    rule       int32 [num_states]: whose state it is, by its place in `entries`; -1 for none
    faults     bool [num_rules]: set for those that may be empty; if there are none, where one byte does not tell
               whether to call a rule, or whether it has ended

    -> moves, int32 [num_states, num_bytes]: the next state on a class of bytes, or -c for row c of the calls; and
    these, int32 [num_calls + 1, 2], from row 1: the first state of a rule, and the state to go on with after it
    """
    num_rules = len(entries) - 1
    num_states, num_bytes = len(table), table.shape[1] - num_rules - 1
    moves = np.empty((num_states, num_bytes), np.int32)
    for state in range(num_states):
        for c in range(num_bytes):
            moves[state, c] = table[state, c]
    may_be_empty = False
    for r in range(num_rules):
        if accepting[entries[r + 1]]:
            faults[r] = may_be_empty = True
    if may_be_empty:
        return moves, np.zeros((1, 2), np.int32)
    num_calls = 0
    for state in range(2, num_states):
        for r in range(num_rules):
            num_calls += table[state, num_bytes + r] != 0
    calls = np.zeros((num_calls + 1, 2), np.int32)
    sites = np.zeros((num_calls + 1, 2), np.int32)  # the state that calls, and the rule
    i = 0
    for state in range(2, num_states):
        for r in range(num_rules):
            if table[state, num_bytes + r] != 0:
                i += 1
                sites[i, 0], sites[i, 1] = state, r
                calls[i, 0], calls[i, 1] = entries[r + 1], table[state, num_bytes + r]
    firsts = first_bytes(table, entries)
    for i in range(1, num_calls + 1):
        state, r = sites[i, 0], sites[i, 1]
        for c in range(num_bytes):
            if firsts[r, c]:
                if moves[state, c] != 0:
                    faults[r] = True
                moves[state, c] = -i
    # what may follow each rule, by the rule before it, and whether a byte of it goes on inside the rule as well
    follows = np.zeros((num_rules + 1, num_bytes), np.bool_)
    ends = np.zeros((num_rules + 1, num_rules + 1), np.bool_)
    for i in range(1, num_calls + 1):
        state, r = sites[i, 0], sites[i, 1]
        after = calls[i, 1]
        for c in range(num_bytes):
            if moves[after, c] != 0:
                follows[r + 1, c] = True
        if accepting[after]:
            ends[r + 1, rule[state]] = True
    changed = True
    while changed:
        changed = False
        for below in range(num_rules + 1):
            for r in range(num_rules + 1):
                if ends[below, r]:
                    for c in range(num_bytes):
                        if follows[r, c] and not follows[below, c]:
                            follows[below, c] = changed = True
    for state in range(num_states):
        if accepting[state] and rule[state] > 0:
            for c in range(num_bytes):
                if moves[state, c] != 0 and follows[rule[state], c]:
                    faults[rule[state] - 1] = True
    return moves, calls
