"""The vocabulary as a trie in preorder: one pass over it decides every token, skipping what cannot match."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from graftlm.core.grammar.jit import jit

Int32Array: TypeAlias = npt.NDArray[np.int32]

BYTE, DEPTH, END, TOKEN = 0, 1, 2, 3


@dataclass(frozen=True, eq=False)
class Trie:
    """Tokens by their bytes.

    nodes      int32 [num_nodes, 4] in preorder: byte, depth (from 1), end of the subtree, token id or -1
    twins      int32 [num_twins, 2]: a token in the trie, and another id with the same bytes
    max_depth  bytes of the longest token
    """

    nodes: Int32Array
    twins: Int32Array
    max_depth: int

    @classmethod
    def build(cls, tokens: Sequence[bytes], token_ids: Sequence[int] | None = None) -> Trie:
        """The trie of those `token_ids` (all, if None) that have bytes."""
        ids = [i for i in (range(len(tokens)) if token_ids is None else token_ids) if tokens[i]]
        ids.sort(key=tokens.__getitem__)
        data = np.frombuffer(b"".join([tokens[i] for i in ids]), np.uint8)
        offsets = np.zeros(len(ids) + 1, np.int64)
        np.cumsum(np.fromiter((len(tokens[i]) for i in ids), np.int64, len(ids)), out=offsets[1:])
        max_depth = int(np.diff(offsets).max(initial=0))
        nodes = np.empty((len(data), 4), np.int32)
        twins = np.empty((len(ids), 2), np.int32)
        num_nodes, num_twins = _fill(
            data, offsets, np.array(ids, np.int32), nodes, twins, np.empty(max_depth, np.int64)
        )
        return cls(nodes[:num_nodes].copy(), twins[:num_twins].copy(), max_depth)

    def longest_prefix(self, data: bytes, position: int = 0) -> int | None:
        """The longest token that `data` begins with at `position`."""
        ahead = np.frombuffer(data, np.uint8, min(self.max_depth, len(data) - position), position)
        found = _longest_prefix(self.nodes, ahead)
        return None if found < 0 else int(found)

    @property
    def num_bytes(self) -> int:
        return self.nodes.nbytes + self.twins.nbytes


@jit
def _fill(
    data: npt.NDArray[np.uint8],
    offsets: npt.NDArray[np.int64],
    ids: Int32Array,
    nodes: Int32Array,
    twins: Int32Array,
    path: npt.NDArray[np.int64],
) -> tuple[int, int]:
    """Lay out sorted tokens: token i is `data[offsets[i] : offsets[i + 1]]`. -> number of nodes, of twins"""
    num_nodes, num_twins, open_nodes = 0, 0, 0
    for i in range(len(ids)):
        start, length = offsets[i], offsets[i + 1] - offsets[i]
        shared = 0
        while shared < open_nodes and shared < length and nodes[path[shared], 0] == data[start + shared]:
            shared += 1
        while open_nodes > shared:
            open_nodes -= 1
            nodes[path[open_nodes], 2] = num_nodes
        for depth in range(shared, length):
            nodes[num_nodes, 0] = data[start + depth]
            nodes[num_nodes, 1] = depth + 1
            nodes[num_nodes, 3] = -1
            path[depth] = num_nodes
            num_nodes += 1
        open_nodes = length
        last = path[length - 1]
        if nodes[last, 3] < 0:
            nodes[last, 3] = ids[i]
        else:
            twins[num_twins, 0] = nodes[last, 3]
            twins[num_twins, 1] = ids[i]
            num_twins += 1
    while open_nodes > 0:
        open_nodes -= 1
        nodes[path[open_nodes], 2] = num_nodes
    return num_nodes, num_twins


@jit
def find_child(nodes: Int32Array, first: int, end: int, byte: int) -> int:
    """The sibling that carries `byte` among those from `first` up to `end`, or -1."""
    node = first
    while node < end:
        if nodes[node, 0] == byte:
            return node
        node = nodes[node, 2]
    return -1


@jit
def _longest_prefix(nodes: Int32Array, data: npt.NDArray[np.uint8]) -> int:
    found = -1
    first, end = 0, len(nodes)
    for byte in data:
        node = find_child(nodes, first, end, byte)
        if node < 0:
            break
        if nodes[node, 3] >= 0:
            found = nodes[node, 3]
        first, end = node + 1, nodes[node, 2]
    return found
