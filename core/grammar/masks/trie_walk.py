"""The trie walk: which tokens an automaton can read from one place."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from graftlm.core.grammar.automata.dfa import Dfa, Place
from graftlm.core.grammar.automata.jit import Int32Array, inner, loop
from graftlm.core.grammar.masks.trie import LeavingTokens, Trie, begun

if TYPE_CHECKING:
    import numpy.typing as npt

BoolArray: TypeAlias = "npt.NDArray[np.bool_]"

_NO_COUNTS = np.zeros(0, np.int32)
_ANYWHERE = np.zeros(0, np.bool_)


def allow_tokens(trie: Trie, dfa: Dfa, place: Place, row: Int32Array, ends: BoolArray = _ANYWHERE) -> int:
    """Set the bits of all tokens in `trie` that the automaton can read from `place`; other bits do not change.

    row   int32 [num_words]
    ends  bool [num_states]: states to which tokens may lead; empty: all
    -> a 64-bit hash of the tokens found, 0 for none
    """
    return _walk_all(
        trie.nodes, trie.roots, trie.twins, trie.max_depth, dfa.table, dfa.classes, dfa.actions, place[0],
        _counts(dfa, place), ends, row,
    )  # fmt: skip


def allow_leaving(tokens: LeavingTokens, dfa: Dfa, place: Place, row: Int32Array) -> int:
    """Set the bits of the tokens that leave the class of characters that `place` repeats. -> as `allow_tokens`"""
    return _walk_leaving(
        tokens.nodes, tokens.first, tokens.twins, tokens.max_depth, tokens.character, dfa.table, dfa.classes,
        dfa.actions, place[0], _counts(dfa, place), row,
    )  # fmt: skip


def _counts(dfa: Dfa, place: Place) -> Int32Array:
    return np.array(place[1:], np.int32) if dfa.loops else _NO_COUNTS


def first_continued(trie: Trie, suffix: bytes, dfa: Dfa, place: Place) -> int:
    """Return the first index of `suffix` at which a longer token starts that the automaton can continue from `place`.

    place  the place after `suffix`
    -> -1 if there is none
    """
    return _first_continued(
        trie.nodes, trie.roots, trie.max_depth, dfa.table, dfa.classes, dfa.actions, np.array(place, np.int32),
        np.frombuffer(suffix, np.uint8),
    )  # fmt: skip


@loop("i8(i4[:,::1], i4[::1], i4[:,::1], i8, i4[:,::1], u1[::1], i4[:,::1], i8, i4[::1], b1[::1], i4[::1])")
def _walk_all(
    nodes: Int32Array,
    roots: Int32Array,
    twins: Int32Array,
    max_depth: int,
    table: Int32Array,
    classes: npt.NDArray[np.uint8],
    actions: Int32Array,
    state: int,
    counts: Int32Array,
    ends: BoolArray,
    row: Int32Array,
) -> int:
    """Walk the subtrees of the first bytes that `state` allows. -> a hash of the tokens found"""
    states = np.empty(max_depth + 1, np.int32)
    stack = np.empty((max_depth + 1, len(counts)), np.int32)
    states[0] = state
    for r in range(len(counts)):
        stack[0, r] = counts[r]
    found = 0
    for byte in range(256):
        root = roots[byte]
        if root >= 0 and table[state, classes[byte]] != 0:
            found ^= _walk(nodes, root, nodes[root, 2], 0, table, classes, actions, states, stack, ends, row, False)
    copy_twins(twins, row)
    return found


@inner
def _walk(
    nodes: Int32Array,
    first: int,
    last: int,
    above: int,
    table: Int32Array,
    classes: npt.NDArray[np.uint8],
    actions: Int32Array,
    states: Int32Array,
    counts: Int32Array,
    ends: BoolArray,
    row: Int32Array,
    only_one: bool,
) -> int:
    """Walk nodes `first` to `last`, below a node of depth `above`, from the place in `states[0]` and `counts[0]`.

    -> a hash of the tokens found, 0 for none; with `only_one`, 1 as soon as there is one
    """
    found = 0
    node = first
    while node < last:
        depth = nodes[node, 1] - above
        target = table[states[depth - 1], classes[nodes[node, 0]]]
        if target != 0:
            target = _arrive(target, actions, counts, depth)
        if target == 0:
            node = nodes[node, 2]
            continue
        states[depth] = target
        token = nodes[node, 3]
        if token >= 0 and (len(ends) == 0 or ends[target]):
            if only_one:
                return 1
            row[token >> 5] |= np.int32(1) << np.int32(token & 31)
            mixed = (int(token) + 1) * 0x9E3779B97F4A7C1  # wraps; in any order of tokens
            mixed = (mixed ^ (mixed >> 31)) * 0x3F58476D1CE4E5B9
            found ^= mixed ^ (mixed >> 29)
        node += 1
    return found


@inner
def _arrive(target: int, actions: Int32Array, counts: Int32Array, depth: int) -> int:
    """Fill `counts[depth]` with what `target` makes of those of the byte before. -> the state, 0 for none"""
    num_registers = counts.shape[1]
    for r in range(num_registers):
        counts[depth, r] = counts[depth - 1, r]
    if target > 0:
        return target
    action = -target
    register, zone = actions[action, 0], 1
    if register >= 0:
        minimum, maximum = actions[action, 1], actions[action, 2]
        value = counts[depth, register] + 1
        if value < minimum:
            zone = 0
        elif maximum < 0:
            value = minimum
        elif value >= maximum:
            zone = 2
        counts[depth, register] = value
    zero = actions[action, 6 + zone]
    for r in range(num_registers):
        if (zero >> r) & 1:
            counts[depth, r] = 0
    return int(actions[action, 3 + zone])


@loop("i8(i4[:,::1], i4[::1], i4[:,::1], i8, i8, i4[:,::1], u1[::1], i4[:,::1], i8, i4[::1], i4[::1])")
def _walk_leaving(
    nodes: Int32Array,
    firsts: Int32Array,
    twins: Int32Array,
    max_depth: int,
    character: int,
    table: Int32Array,
    classes: npt.NDArray[np.uint8],
    actions: Int32Array,
    state: int,
    counts: Int32Array,
    row: Int32Array,
) -> int:
    """Walk what follows each number of characters, from where that many lead. -> a hash of the tokens found"""
    states = np.empty(max_depth + 1, np.int32)
    stack = np.empty((max_depth + 1, len(counts)), np.int32)
    here, anywhere = np.empty((2, len(counts)), np.int32), np.empty(0, np.bool_)
    for r in range(len(counts)):
        here[0, r] = counts[r]
    found = 0
    for n in range(len(firsts) - 1):
        states[0] = state
        for r in range(len(counts)):
            stack[0, r] = here[0, r]
        first, last = firsts[n], firsts[n + 1]
        found ^= _walk(nodes, first, last, 0, table, classes, actions, states, stack, anywhere, row, False)
        target = table[state, classes[character]]
        if target != 0:
            target = _arrive(target, actions, here, 1)
        if target == 0:
            break
        state = target
        for r in range(len(counts)):
            here[0, r] = here[1, r]
    copy_twins(twins, row)
    return found


@loop("i8(i4[:,::1], i4[::1], i8, i4[:,::1], u1[::1], i4[:,::1], i4[::1], u1[::1])", quick=True)
def _first_continued(
    nodes: Int32Array,
    roots: Int32Array,
    max_depth: int,
    table: Int32Array,
    classes: npt.NDArray[np.uint8],
    actions: Int32Array,
    place: Int32Array,
    suffix: npt.NDArray[np.uint8],
) -> int:
    states = np.empty(max_depth + 1, np.int32)
    counts, anywhere = np.empty((max_depth + 1, len(place) - 1), np.int32), np.empty(0, np.bool_)
    states[0] = place[0]
    for r in range(counts.shape[1]):
        counts[0, r] = place[r + 1]
    for start in range(len(suffix)):
        node = begun(nodes, roots, suffix, start)
        if node >= 0 and _walk(
            nodes, node + 1, nodes[node, 2], nodes[node, 1], table, classes, actions, states, counts, anywhere,
            counts[0], True,
        ):  # fmt: skip
            return start
    return -1


@loop("b1(i4[:,::1], i4[::1], i4[:,::1], u1[::1], i2[::1], i8, i8, i8)", quick=True)
def leads_to_many(
    nodes: Int32Array,
    roots: Int32Array,
    table: Int32Array,
    classes: npt.NDArray[np.uint8],
    degrees: npt.NDArray[np.int16],
    state: int,
    least_degree: int,
    least_nodes: int,
) -> bool:
    """Whether `least_nodes` of the trie lie below bytes that lead from `state` to states of `least_degree` or more."""
    num_nodes = 0
    for byte in range(256):
        root, target = roots[byte], table[state, classes[byte]]
        # a counter or a call is taken for a state of many bytes
        if root >= 0 and (target < 0 or target > 0 and degrees[target] >= least_degree):
            num_nodes += nodes[root, 2] - root
    return num_nodes >= least_nodes


@inner
def copy_twins(twins: Int32Array, row: Int32Array) -> None:
    """Allow the tokens that have the bytes of one that is allowed. twins int32 [num_twins, 2]"""
    for i in range(len(twins)):
        token, twin = twins[i, 0], twins[i, 1]
        if (row[token >> 5] >> np.int32(token & 31)) & np.int32(1):
            row[twin >> 5] |= np.int32(1) << np.int32(twin & 31)
