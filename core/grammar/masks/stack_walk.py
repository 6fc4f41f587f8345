"""The trie walk of a pushdown automaton: which tokens it can read from one place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from graftlm.core.grammar.automata.dfa import Place
from graftlm.core.grammar.automata.jit import Int32Array, inner, loop
from graftlm.core.grammar.automata.stack.dpda import Dpda
from graftlm.core.grammar.masks.trie import LeavingTokens, Trie, begun
from graftlm.core.grammar.masks.trie_walk import copy_twins

if TYPE_CHECKING:
    import numpy.typing as npt


def allow_tokens(trie: Trie, dpda: Dpda, place: Place, row: Int32Array) -> tuple[int, int]:
    """Set the bits of all tokens in `trie` that the automaton can read from `place`; others stay as they are.

    row  int32 [num_words]
    -> a 64-bit hash of the tokens found, 0 for none; and how much of `place` that depends on: its first so many
    numbers, one more than it has where it matters that there are no others
    """
    seen = np.zeros(1, np.int32)
    found = _walk_all(
        trie.nodes, trie.roots, trie.twins, trie.max_depth, dpda.table, dpda.classes, dpda.accepting, dpda.calls,
        np.array(place, np.int32), row, seen,
    )  # fmt: skip
    return found, int(seen[0])


def allow_leaving(tokens: LeavingTokens, dpda: Dpda, place: Place, row: Int32Array) -> tuple[int, int]:
    """The same of tokens that leave the class of characters that `place` repeats."""
    seen = np.ones(1, np.int32)
    found = _walk_leaving(
        tokens.nodes, tokens.first, tokens.twins, tokens.max_depth, tokens.character, dpda.table, dpda.classes,
        dpda.accepting, dpda.calls, np.array(place, np.int32), row, seen,
    )  # fmt: skip
    return found, int(seen[0])


def first_continued(trie: Trie, suffix: bytes, dpda: Dpda, place: Place) -> int:
    """Return the first index of `suffix` at which a longer token starts that the automaton can continue from `place`.

    place  the place after `suffix`
    -> -1 if there is none
    """
    return _first_continued(
        trie.nodes, trie.roots, trie.max_depth, dpda.table, dpda.classes, dpda.accepting, dpda.calls,
        np.array(place, np.int32), np.frombuffer(suffix, np.uint8),
    )  # fmt: skip


@loop("i8(i4[:,::1], i4[::1], i4[:,::1], i8, i4[:,::1], u1[::1], b1[::1], i4[:,::1], i4[::1], i4[::1], i4[::1])")
def _walk_all(
    nodes: Int32Array,
    roots: Int32Array,
    twins: Int32Array,
    max_depth: int,
    table: Int32Array,
    classes: npt.NDArray[np.uint8],
    accepting: npt.NDArray[np.bool_],
    calls: Int32Array,
    place: Int32Array,
    row: Int32Array,
    seen: Int32Array,
) -> int:
    """Walk the subtrees of the first bytes that `place` allows. -> a hash of the tokens found"""
    found = 0
    for byte in range(256):
        root = roots[byte]
        if root >= 0 and (table[place[0], classes[byte]] != 0 or accepting[place[0]]):
            found ^= _walk(
                nodes, root, nodes[root, 2], 0, max_depth, table, classes, accepting, calls, place, row, seen, False
            )
    seen[0] = max(seen[0], 1)
    copy_twins(twins, row)
    return found


@loop("i8(i4[:,::1], i4[::1], i4[:,::1], i8, i8, i4[:,::1], u1[::1], b1[::1], i4[:,::1], i4[::1], i4[::1], i4[::1])")
def _walk_leaving(
    nodes: Int32Array,
    firsts: Int32Array,
    twins: Int32Array,
    max_depth: int,
    character: int,
    table: Int32Array,
    classes: npt.NDArray[np.uint8],
    accepting: npt.NDArray[np.bool_],
    calls: Int32Array,
    place: Int32Array,
    row: Int32Array,
    seen: Int32Array,
) -> int:
    """Walk what follows each number of characters, from the state that these lead to. -> a hash of the tokens found"""
    found = 0
    for n in range(len(firsts) - 1):
        found ^= _walk(
            nodes, firsts[n], firsts[n + 1], 0, max_depth, table, classes, accepting, calls, place, row, seen, False
        )
        place[0] = table[place[0], classes[character]]
        if place[0] <= 0:
            break
    copy_twins(twins, row)
    return found


@inner
def _walk(
    nodes: Int32Array,
    first: int,
    last: int,
    above: int,
    max_depth: int,
    table: Int32Array,
    classes: npt.NDArray[np.uint8],
    accepting: npt.NDArray[np.bool_],
    calls: Int32Array,
    place: Int32Array,
    row: Int32Array,
    seen: Int32Array,
    only_one: bool,
) -> int:
    """Walk nodes `first` to `last`, below a node of depth `above`, from `place`.

    The stack is a list of frames that know the one below: those of `place` come first, the innermost last. Frames that
    were added for a token are forgotten once the walk has left its bytes.

    -> a hash of the tokens found, 0 for none; with `only_one`, 1 as soon as there is one
    """
    num_frames = len(place) - 1
    states = np.empty(max_depth + 1, np.int32)
    tops = np.empty(max_depth + 1, np.int32)  # the innermost frame, 0 for none
    useds = np.empty(max_depth + 1, np.int32)
    frames = np.empty((num_frames + 65, 2), np.int32)  # the state to go on with, and the frame below
    for i in range(num_frames):
        frames[i + 1, 0], frames[i + 1, 1] = place[num_frames - i], i
    states[0], tops[0], useds[0] = place[0], num_frames, num_frames + 1
    deepest = seen[0]
    found = 0
    node = first
    while node < last:
        depth = nodes[node, 1] - above
        c = classes[nodes[node, 0]]
        state, top, used = states[depth - 1], tops[depth - 1], useds[depth - 1]
        target = table[state, c]
        while target <= 0:
            if target < 0:
                if used == len(frames):
                    more = np.empty((2 * used, 2), np.int32)
                    more[:used] = frames
                    frames = more
                frames[used, 0], frames[used, 1] = calls[-target, 1], top
                top = used
                used += 1
                state = calls[-target, 0]
            elif accepting[state]:
                if top <= num_frames:  # a frame of `place`, or that there is none
                    deepest = max(deepest, num_frames - top + 2)
                if top == 0:
                    break
                state, top = frames[top, 0], frames[top, 1]
            else:
                break
            target = table[state, c]
        if target <= 0:
            node = nodes[node, 2]
            continue
        states[depth], tops[depth], useds[depth] = target, top, used
        token = nodes[node, 3]
        if token >= 0:
            if only_one:
                return 1
            row[token >> 5] |= np.int32(1) << np.int32(token & 31)
            mixed = (int(token) + 1) * 0x9E3779B97F4A7C1  # wraps; in any order of tokens
            mixed = (mixed ^ (mixed >> 31)) * 0x3F58476D1CE4E5B9
            found ^= mixed ^ (mixed >> 29)
        node += 1
    seen[0] = deepest
    return found


@loop("i8(i4[:,::1], i4[::1], i8, i4[:,::1], u1[::1], b1[::1], i4[:,::1], i4[::1], u1[::1])", quick=True)
def _first_continued(
    nodes: Int32Array,
    roots: Int32Array,
    max_depth: int,
    table: Int32Array,
    classes: npt.NDArray[np.uint8],
    accepting: npt.NDArray[np.bool_],
    calls: Int32Array,
    place: Int32Array,
    suffix: npt.NDArray[np.uint8],
) -> int:
    seen = np.zeros(1, np.int32)
    for start in range(len(suffix)):
        node = begun(nodes, roots, suffix, start)
        if node >= 0 and _walk(
            nodes, node + 1, nodes[node, 2], nodes[node, 1], max_depth, table, classes, accepting, calls, place, seen,
            seen, True,
        ):  # fmt: skip
            return start
    return -1
