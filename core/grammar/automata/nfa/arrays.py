"""The arrays of an NFA, filled from what its builder put down: literals, blocks and copies of what was added before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from graftlm.core.grammar.automata.jit import Int32Array, loop

if TYPE_CHECKING:
    import numpy.typing as npt

    UInt8Array = npt.NDArray[np.uint8]

SKIP, SYMBOL, LITERAL, BLOCK, COPY = range(5)
"""Kinds of steps."""


@loop("void(i4[:,::1], u1[::1], i4[:,::1], i4[::1], i4[:,::1], i4[:,::1])", quick=True)
def write_edges(
    steps: Int32Array,
    texts: UInt8Array,
    copies: Int32Array,
    blocks: Int32Array,
    edges: Int32Array,
    epsilons: Int32Array,
) -> None:
    """Fill `edges` and `epsilons`, step by step.

    steps     int32 [num_steps, 4]: a kind, the state that it begins at, then
              SKIP     the state that it leads to
              SYMBOL   the state that it leads to, the symbol
              LITERAL  its first new state, how many bytes of `texts` it takes
              BLOCK    its first new state, where the block begins in `blocks`
              COPY     its first new state, the row of `copies`
    copies    int32 [num_copies, 5]: the first state of what is copied, where its edges begin and end, and where its
              epsilon edges do
    blocks    int32: of each block the number of its edges and of its epsilon edges, then these
    edges     int32 [num_edges, 4]: source, target, lowest and highest byte or symbol
    epsilons  int32 [num_epsilons, 2]: source, target

    States of a block are counted from its first one; -1 is the state that it begins at.
    """
    text, e, p = 0, 0, 0
    for i in range(len(steps)):
        kind, source, first, value = steps[i, 0], steps[i, 1], steps[i, 2], steps[i, 3]
        if kind == SKIP:
            epsilons[p, 0], epsilons[p, 1] = source, first
            p += 1
        elif kind == SYMBOL:
            edges[e, 0], edges[e, 1], edges[e, 2], edges[e, 3] = source, first, value, value
            e += 1
        elif kind == LITERAL:
            for state in range(first, first + value):
                edges[e, 0], edges[e, 1] = source, state
                edges[e, 2] = edges[e, 3] = texts[text]
                source = state
                text += 1
                e += 1
        elif kind == BLOCK:
            at = value + 2
            for _ in range(blocks[value]):
                edges[e, 0] = source if blocks[at] < 0 else blocks[at] + first
                edges[e, 1] = source if blocks[at + 1] < 0 else blocks[at + 1] + first
                edges[e, 2], edges[e, 3] = blocks[at + 2], blocks[at + 3]
                at += 4
                e += 1
            for _ in range(blocks[value + 1]):
                epsilons[p, 0] = source if blocks[at] < 0 else blocks[at] + first
                epsilons[p, 1] = source if blocks[at + 1] < 0 else blocks[at + 1] + first
                at += 2
                p += 1
        else:
            known = copies[value, 0]
            for j in range(copies[value, 1], copies[value, 2]):
                edges[e, 0] = source if edges[j, 0] < known else edges[j, 0] - known + first
                edges[e, 1] = source if edges[j, 1] < known else edges[j, 1] - known + first
                edges[e, 2], edges[e, 3] = edges[j, 2], edges[j, 3]
                e += 1
            for j in range(copies[value, 3], copies[value, 4]):
                epsilons[p, 0] = source if epsilons[j, 0] < known else epsilons[j, 0] - known + first
                epsilons[p, 1] = source if epsilons[j, 1] < known else epsilons[j, 1] - known + first
                p += 1


@loop("i8(i4[:,::1], i4[:,::1], i4[::1], i4[:,::1], i4[::1], i4[::1], u1[::1])", quick=True)
def sort_edges(
    edges: Int32Array,
    epsilons: Int32Array,
    edge_ptr: Int32Array,
    sorted_edges: Int32Array,
    epsilon_ptr: Int32Array,
    targets: Int32Array,
    classes: UInt8Array,
) -> int:
    """Bring edges into the order of their sources, with classes of bytes in place of bytes, as `Nfa` has them.

    edges, epsilons       as `write_edges` leaves them
    edge_ptr, epsilon_ptr int32 [num_states + 1], all 0
    sorted_edges          int32 [num_edges, 3]: filled with first class, last class and target
    targets               int32 [num_epsilons]: filled likewise
    classes               uint8 [256]: filled with the class of each byte; a symbol has a class of its own

    -> the number of classes
    """
    last = 255
    for e in range(len(edges)):
        edge_ptr[edges[e, 0] + 1] += 1
        last = max(last, edges[e, 3])
    for p in range(len(epsilons)):
        epsilon_ptr[epsilons[p, 0] + 1] += 1
    for state in range(1, len(edge_ptr)):
        edge_ptr[state] += edge_ptr[state - 1]
        epsilon_ptr[state] += epsilon_ptr[state - 1]
    class_of = np.zeros(last + 2, np.int32)  # first, whether a byte begins a class
    class_of[256:] = 1
    for e in range(len(edges)):
        class_of[edges[e, 2]] = class_of[edges[e, 3] + 1] = 1
    class_of[0] = 0
    for byte in range(1, last + 1):
        class_of[byte] += class_of[byte - 1]
    for byte in range(256):
        classes[byte] = class_of[byte]
    position = edge_ptr.copy()
    for e in range(len(edges)):
        i = position[edges[e, 0]]
        position[edges[e, 0]] = i + 1
        sorted_edges[i, 0], sorted_edges[i, 1] = class_of[edges[e, 2]], class_of[edges[e, 3]]
        sorted_edges[i, 2] = edges[e, 1]
    position = epsilon_ptr.copy()
    for p in range(len(epsilons)):
        i = position[epsilons[p, 0]]
        position[epsilons[p, 0]] = i + 1
        targets[i] = epsilons[p, 1]
    return int(class_of[last]) + 1
