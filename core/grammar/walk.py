"""The walk of the token trie through an automaton: which tokens fit from one place."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from graftlm.core.grammar import jit
from graftlm.core.grammar.dfa import Dfa, Place
from graftlm.core.grammar.trie import Int32Array, Trie

UInt32Array = npt.NDArray[np.uint32]

_NO_ROW = np.zeros(0, np.uint32)


def allow_tokens(trie: Trie, dfa: Dfa, place: Place, row: Int32Array) -> int:
    """Set the bits of all tokens in `trie` that the automaton can read from `place`; others stay as they are.

    row  int32 [num_words] -> a hash of the tokens found, 0 for none
    """
    if not jit.COMPILED:
        return allow_tokens_by_level(trie, dfa, place, row)
    words = row.view(np.uint32)
    start = np.array(place, np.int32)
    found = _walk(
        trie.nodes, 0, len(trie.nodes), 0, trie.max_depth, dfa.table, dfa.classes, dfa.actions, start, words, False
    )
    if len(trie.twins):
        _copy_twins(trie.twins, words)
    return int(found)


def continues(trie: Trie, node: int, dfa: Dfa, place: Place) -> bool:
    """Whether a token below `node` goes on in a way that the automaton can read from `place`."""
    depth, end = int(trie.nodes[node, 1]), int(trie.nodes[node, 2])
    start = np.array(place, np.int32)
    return bool(
        _walk(
            trie.nodes, node + 1, end, depth, trie.max_depth, dfa.table, dfa.classes, dfa.actions, start, _NO_ROW, True
        )
    )


@jit.jit
def _walk(
    nodes: Int32Array,
    first: int,
    last: int,
    above: int,
    max_depth: int,
    table: Int32Array,
    classes: npt.NDArray[np.uint8],
    actions: Int32Array,
    place: Int32Array,
    row: UInt32Array,
    only_one: bool,
) -> int:
    """Walk nodes `first` to `last`, below a node of depth `above`. -> a hash of the tokens found, 0 for none"""
    num_registers = len(place) - 1
    states = np.empty(max_depth - above + 1, np.int32)
    counts = np.empty((max_depth - above + 1, num_registers), np.int32)
    states[0] = place[0]
    for r in range(num_registers):
        counts[0, r] = place[1 + r]
    found = 0
    node = first
    while node < last:
        depth = nodes[node, 1] - above
        target = table[states[depth - 1], classes[nodes[node, 0]]]
        if target == 0:
            node = nodes[node, 2]
            continue
        for r in range(num_registers):
            counts[depth, r] = counts[depth - 1, r]
        if target < 0:
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
            target = actions[action, 3 + zone]
            zero = actions[action, 6 + zone]
            for r in range(num_registers):
                if (zero >> r) & 1:
                    counts[depth, r] = 0
            if target == 0:
                node = nodes[node, 2]
                continue
        states[depth] = target
        token = nodes[node, 3]
        if token >= 0:
            if only_one:
                return 1
            row[token >> 5] |= np.uint32(1) << np.uint32(token & 31)
            mixed = (token + 1) * 0x9E3779B97F4A7C1
            found ^= mixed ^ (mixed >> 29)
        node += 1
    return found


@jit.jit
def _copy_twins(twins: Int32Array, row: UInt32Array) -> None:
    for i in range(len(twins)):
        token, twin = twins[i, 0], twins[i, 1]
        if (row[token >> 5] >> np.uint32(token & 31)) & np.uint32(1):
            row[twin >> 5] |= np.uint32(1) << np.uint32(twin & 31)


def allow_tokens_by_level(trie: Trie, dfa: Dfa, place: Place, row: Int32Array) -> int:
    """The same as `allow_tokens` with numpy alone, all nodes of one depth at a time."""
    allowed = np.zeros(32 * len(row), bool)
    states = np.array([place[0]], np.int32)
    counts = np.array([place[1:]], np.int32)
    for byte, parent, token in trie.levels:
        states, counts = _step(dfa, states[parent], counts[parent], byte)
        alive = states != 0
        if not alive.any():
            break
        hits = token[alive]
        allowed[hits[hits >= 0]] = True
    twins = trie.twins[allowed[trie.twins[:, 0]]]
    allowed[twins[:, 1]] = True
    row |= np.packbits(allowed, bitorder="little").view(np.int32)
    return hash(row.tobytes())


def _step(dfa: Dfa, states: Int32Array, counts: Int32Array, byte: Int32Array) -> tuple[Int32Array, Int32Array]:
    """One byte for many places at once: states [n], counts [n, num_registers], byte [n]."""
    targets = dfa.table[states, dfa.classes[byte]]
    acting = np.nonzero(targets < 0)[0]
    if not len(acting):
        return targets, counts
    counts = counts.copy()
    fields = dfa.actions[-targets[acting]]
    register, minimum, maximum = fields[:, 0], fields[:, 1], fields[:, 2]
    counting = register >= 0
    column = np.maximum(register, 0)
    value = counts[acting, column] + counting
    endless = counting & (maximum < 0)
    zone = np.ones(len(acting), np.int64)
    zone[counting & (value < minimum)] = 0
    zone[counting & ~endless & (value >= minimum) & (value >= maximum)] = 2
    value = np.where(endless, np.minimum(value, minimum), value)
    counts[acting, column] = value
    rows = np.arange(len(acting))
    zero = fields[rows, 6 + zone]
    for r in range(counts.shape[1]):
        counts[acting[(zero >> r) & 1 == 1], r] = 0
    targets[acting] = fields[rows, 3 + zone]
    return targets, counts
