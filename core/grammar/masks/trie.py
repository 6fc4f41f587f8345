"""The vocabulary as a trie in preorder: one pass over it decides every token, skipping what cannot match."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from graftlm.core.grammar.automata.jit import Int32Array, jit

if TYPE_CHECKING:
    import numpy.typing as npt


@dataclass(frozen=True, eq=False)
class SortedTokens:
    """All tokens that have bytes, in the order of their bytes: token `ids[i]` is `data[offsets[i] : offsets[i + 1]]`.

    ids      int32 [num_tokens]
    data     uint8 [num_bytes]
    offsets  int64 [num_tokens + 1]
    """

    ids: Int32Array
    data: npt.NDArray[np.uint8]
    offsets: npt.NDArray[np.int64]

    @classmethod
    def of(cls, tokens: Sequence[bytes]) -> SortedTokens:
        ids = sorted((i for i, token in enumerate(tokens) if token), key=tokens.__getitem__)
        offsets = np.zeros(len(ids) + 1, np.int64)
        np.cumsum(np.fromiter((len(tokens[i]) for i in ids), np.int64, len(ids)), out=offsets[1:])
        data = np.frombuffer(b"".join([tokens[i] for i in ids]), np.uint8).copy()
        return cls(np.array(ids, np.int32), data, offsets)

    @cached_property
    def whole_characters(self) -> npt.NDArray[np.bool_]:
        """[num_tokens]: the token is UTF-8 that begins and ends between characters."""
        pieces = self.data.tobytes()
        whole = np.ones(len(self.ids), bool)
        wide = np.add.reduceat(self.data >= 0x80, self.offsets[:-1]) if len(self.ids) else np.zeros(0, int)
        for i in np.nonzero(wide)[0].tolist():
            try:
                pieces[self.offsets[i] : self.offsets[i + 1]].decode()
            except UnicodeDecodeError:
                whole[i] = False
        return whole

    @cached_property
    def num_characters(self) -> npt.NDArray[np.int64]:
        """[num_tokens]: characters that begin in the token."""
        if not len(self.ids):
            return np.zeros(0, np.int64)
        return np.add.reduceat((self.data & 0xC0) != 0x80, self.offsets[:-1], dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Trie:
    """Tokens by their bytes.

    nodes      int32 [num_nodes, 4] in preorder: byte, depth (from 1), end of the subtree, token id or -1
    twins      int32 [num_twins, 2]: a token in the trie, and another id with the same bytes
    roots      int32 [256]: the node of each first byte, or -1
    max_depth  bytes of the longest token
    """

    nodes: Int32Array
    twins: Int32Array
    roots: Int32Array
    max_depth: int

    @classmethod
    def build(cls, tokens: SortedTokens, keep: npt.NDArray[np.bool_] | None = None) -> Trie:
        """The trie of all tokens, or of those whose place in `tokens` is set in `keep`."""
        if keep is None:
            keep = np.ones(len(tokens.ids), bool)
        lengths = np.diff(tokens.offsets)[keep]
        max_depth = int(lengths.max(initial=0))
        nodes = np.empty((int(lengths.sum()), 4), np.int32)
        twins = np.empty((len(lengths), 2), np.int32)
        path = np.empty(max_depth, np.int64)
        num_nodes, num_twins = _fill(tokens.data, tokens.offsets, tokens.ids, keep, nodes, twins, path)
        nodes = nodes[:num_nodes].copy()
        roots = np.full(256, -1, np.int32)
        firsts = np.flatnonzero(nodes[:, 1] == 1)
        roots[nodes[firsts, 0]] = firsts
        return cls(nodes, twins[:num_twins].copy(), roots, max_depth)

    def find(self, data: bytes) -> int:
        """The node that `data` leads to, or -1."""
        return int(_find(self.nodes, np.frombuffer(data, np.uint8).copy()))

    def longest_prefix(self, data: bytes, position: int = 0) -> int | None:
        """The longest token that `data` begins with at `position`."""
        ahead = np.frombuffer(data, np.uint8, min(self.max_depth, len(data) - position), position).copy()
        found = _longest_prefix(self.nodes, ahead)
        return None if found < 0 else int(found)

    @property
    def num_bytes(self) -> int:
        return self.nodes.nbytes + self.twins.nbytes

    @cached_property
    def levels(self) -> list[tuple[Int32Array, Int32Array, Int32Array]]:
        """The same by depth, for walking it without compiled loops: byte, parent in the level above, token."""
        depth = self.nodes[:, 1]
        parent = np.zeros(len(depth), np.int32)
        rank = np.zeros(len(depth), np.int32)
        order = [np.nonzero(depth == d)[0] for d in range(1, self.max_depth + 1)]
        for above, level in zip([None, *order], order, strict=False):
            rank[level] = np.arange(len(level))
            if above is not None:  # in preorder, the parent is the last node of the level above that comes before
                parent[level] = np.searchsorted(above, level) - 1
        return [(self.nodes[level, 0], parent[level], self.nodes[level, 3]) for level in order]


@jit
def _fill(
    data: npt.NDArray[np.uint8],
    offsets: npt.NDArray[np.int64],
    ids: Int32Array,
    keep: npt.NDArray[np.bool_],
    nodes: Int32Array,
    twins: Int32Array,
    path: npt.NDArray[np.int64],
) -> tuple[int, int]:
    """Lay out sorted tokens. -> number of nodes, number of twins"""
    num_nodes, num_twins, open_nodes = 0, 0, 0
    for i in range(len(ids)):
        if not keep[i]:
            continue
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
def _child(nodes: Int32Array, first: int, end: int, byte: int) -> int:
    """The sibling that carries `byte` among those from `first` up to `end`, or -1."""
    node = first
    while node < end:
        if nodes[node, 0] == byte:
            return node
        node = nodes[node, 2]
    return -1


@jit
def _find(nodes: Int32Array, data: npt.NDArray[np.uint8]) -> int:
    node, first, end = -1, 0, len(nodes)
    for byte in data:
        node = _child(nodes, first, end, byte)
        if node < 0:
            return -1
        first, end = node + 1, nodes[node, 2]
    return node


@jit
def _longest_prefix(nodes: Int32Array, data: npt.NDArray[np.uint8]) -> int:
    found, first, end = -1, 0, len(nodes)
    for byte in data:
        node = _child(nodes, first, end, byte)
        if node < 0:
            break
        if nodes[node, 3] >= 0:
            found = nodes[node, 3]
        first, end = node + 1, nodes[node, 2]
    return found
