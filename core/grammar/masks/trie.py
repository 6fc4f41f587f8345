"""The vocabulary's trie, laid out in preorder: one pass decides every token and skips subtrees that cannot match."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from graftlm.core.grammar.automata.jit import Int32Array, inner, loop
from graftlm.kernels import disk_cache

if TYPE_CHECKING:
    import numpy.typing as npt

_FORMAT = 1
_FEWEST_TOKENS = 4096
"""Smaller vocabularies are indexed in milliseconds and not kept."""
_KEPT = 16


@dataclass(frozen=True, eq=False)
class SortedTokens:
    """All tokens that have bytes, in the order of their bytes: token `ids[i]` is `data[offsets[i] : offsets[i + 1]]`.

    ids               int32 [num_tokens]
    data              uint8 [num_bytes]
    offsets           int64 [num_tokens + 1]
    num_characters    int64 [num_tokens]: UTF-8 characters that begin in the token
    whole_characters  bool [num_tokens]: the token is UTF-8 that begins and ends between characters
    """

    ids: Int32Array
    data: npt.NDArray[np.uint8]
    offsets: npt.NDArray[np.int64]
    num_characters: npt.NDArray[np.int64]
    whole_characters: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, tokens: Sequence[bytes]) -> SortedTokens:
        ids = sorted((i for i, token in enumerate(tokens) if token), key=tokens.__getitem__)
        offsets = np.zeros(len(ids) + 1, np.int64)
        np.cumsum(np.fromiter((len(tokens[i]) for i in ids), np.int64, len(ids)), out=offsets[1:])
        data = np.frombuffer(b"".join([tokens[i] for i in ids]), np.uint8).copy()
        begins = np.append(0, np.cumsum((data & 0xC0) != 0x80))[offsets]
        wide = np.append(0, np.cumsum(data >= 0x80))[offsets]
        whole = np.ones(len(ids), bool)
        for i in np.flatnonzero(np.diff(wide)).tolist():
            try:
                tokens[ids[i]].decode()
            except UnicodeDecodeError:
                whole[i] = False
        return cls(np.array(ids, np.int32), data, offsets, np.diff(begins), whole)

    def holding(self, byte: int) -> npt.NDArray[np.bool_]:
        """bool [num_tokens]: the token holds `byte`."""
        if not len(self.ids):
            return np.zeros(0, bool)
        found: npt.NDArray[np.bool_] = np.logical_or.reduceat(self.data == byte, self.offsets[:-1])
        return found


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
        ids, starts, lengths = tokens.ids, tokens.offsets[:-1], np.diff(tokens.offsets)
        if keep is not None:
            ids, starts, lengths = ids[keep], starts[keep], lengths[keep]
        nodes, twins, _ = lay_out(ids, tokens.data, starts, lengths)
        return cls.of(nodes, twins)

    @classmethod
    def of(cls, nodes: Int32Array, twins: Int32Array) -> Trie:
        """The trie that has these nodes."""
        roots = np.full(256, -1, np.int32)
        firsts = np.flatnonzero(nodes[:, 1] == 1)
        roots[nodes[firsts, 0]] = firsts
        return cls(nodes, twins, roots, int(nodes[:, 1].max(initial=0)))

    def find(self, data: bytes) -> int:
        """The node that `data` leads to, or -1."""
        return int(_find(self.nodes, np.frombuffer(data, np.uint8).copy()))

    def first_begun(self, data: bytes) -> int | None:
        """The first place in `data` from which on it begins a longer token."""
        found = _first_begun(self.nodes, self.roots, np.frombuffer(bytearray(data), np.uint8))
        return None if found < 0 else int(found)

    def longest_prefix(self, data: bytes, position: int = 0) -> int | None:
        """The longest token that `data` begins with at `position`."""
        ahead = np.frombuffer(data, np.uint8, min(self.max_depth, len(data) - position), position).copy()
        found = _longest_prefix(self.nodes, ahead)
        return None if found < 0 else int(found)

    @property
    def num_bytes(self) -> int:
        return self.nodes.nbytes + self.twins.nbytes


def lay_out(
    ids: Int32Array,
    data: npt.NDArray[np.uint8],
    starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    groups: npt.NDArray[np.int64] | None = None,
) -> tuple[Int32Array, Int32Array, npt.NDArray[np.int64]]:
    """The nodes and twins of tokens in the order of their bytes, and for each token the number of nodes before it.

    groups  in ascending order: each group of tokens has a trie of its own, one after the other
    """
    max_depth = int(lengths.max(initial=0))
    shared = _shared_bytes(data, starts, lengths, max_depth)
    if groups is not None:
        shared[1:][groups[1:] != groups[:-1]] = 0
    # each token adds a node for every byte that it does not share with the token before it
    num_new = lengths - shared
    until = np.cumsum(num_new)
    last = until - 1
    num_nodes = int(num_new.sum())
    owner = np.repeat(np.arange(len(ids)), num_new)
    depth = np.arange(num_nodes) - (last - lengths + 1)[owner]
    nodes = np.empty((num_nodes, 4), np.int32)
    nodes[:, 0] = data[starts[owner] + depth]
    nodes[:, 1] = depth + 1
    nodes[:, 2] = _subtree_ends(depth.astype(np.int16), max_depth)
    nodes[:, 3] = -1
    is_new = num_new > 0
    nodes[last[is_new], 3] = ids[is_new]
    first = np.maximum.accumulate(np.where(is_new, np.arange(len(ids)), 0))  # of tokens with equal bytes
    twins = np.stack([ids[first[~is_new]], ids[~is_new]], axis=1)
    return nodes, twins, until - num_new


def _shared_bytes(
    data: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], max_depth: int
) -> npt.NDArray[np.int64]:
    """How many bytes each token shares with the one before it."""
    shared = np.zeros(len(starts), np.int64)
    alike = np.arange(1, len(starts))
    for depth in range(max_depth):
        alike = alike[np.minimum(lengths[alike], lengths[alike - 1]) > depth]
        alike = alike[data[starts[alike] + depth] == data[starts[alike - 1] + depth]]
        shared[alike] += 1
    return shared


def _subtree_ends(depth: npt.NDArray[np.int16], max_depth: int) -> npt.NDArray[np.int64]:
    """For nodes in preorder, the next node that is not below each: the next of the same or a smaller depth."""
    ends = np.full(len(depth), len(depth), np.int64)
    for d in range(max_depth):
        upper = np.flatnonzero(depth <= d)
        here = np.flatnonzero(depth[upper[:-1]] == d)
        ends[upper[here]] = upper[here + 1]
    return ends


@inner
def _child(nodes: Int32Array, first: int, end: int, byte: int) -> int:
    """The sibling that carries `byte` among those from `first` up to `end`, or -1."""
    node = first
    while node < end:
        if nodes[node, 0] == byte:
            return node
        node = nodes[node, 2]
    return -1


@loop("i8(i4[:,::1], u1[::1])", quick=True)
def _find(nodes: Int32Array, data: npt.NDArray[np.uint8]) -> int:
    node, first, end = -1, 0, len(nodes)
    for byte in data:
        node = _child(nodes, first, end, byte)
        if node < 0:
            return -1
        first, end = node + 1, nodes[node, 2]
    return node


@inner
def begun(nodes: Int32Array, roots: Int32Array, data: npt.NDArray[np.uint8], start: int) -> int:
    """The node that the bytes of `data` from `start` on lead to if tokens go on below it, else -1."""
    node = roots[data[start]]
    for i in range(start + 1, len(data)):
        if node < 0:
            break
        node = _child(nodes, node + 1, nodes[node, 2], data[i])
    return int(node) if node >= 0 and nodes[node, 2] > node + 1 else -1


@loop("i8(i4[:,::1], i4[::1], u1[::1])", quick=True)
def _first_begun(nodes: Int32Array, roots: Int32Array, data: npt.NDArray[np.uint8]) -> int:
    for start in range(len(data)):
        if begun(nodes, roots, data, start) >= 0:
            return start
    return -1


@loop("i8(i4[:,::1], u1[::1])", quick=True)
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


@dataclass(frozen=True, eq=False)
class LeavingTokens:
    """Tokens that begin with characters of one class and leave it: for each number of characters, a trie of the rest.

    In a repeat all characters of its class lead to the same state, so tokens that differ in these characters alone are
    allowed together, and the trie holds one of them.

    nodes      int32 [num_nodes, 4], as in a Trie: the tries one after the other
    twins      int32 [num_twins, 2]: a token in the trie, and another one that differs from it in its characters
    first      int32 [largest number of characters + 2]: the first node of the trie for each number
    max_depth  bytes of the longest text after the characters
    character  a byte that is a character of the class
    """

    nodes: Int32Array
    twins: Int32Array
    first: Int32Array
    max_depth: int
    character: int

    @classmethod
    def of(
        cls,
        tokens: SortedTokens,
        places: npt.NDArray[np.int64],
        num_characters: npt.NDArray[np.int64],
        ends: npt.NDArray[np.int64],
        character: int,
    ) -> LeavingTokens:
        """Build the tries of some tokens.

        places          int64 [num]: which of `tokens`
        num_characters  int64 [num]: characters of the class that each of them begins with
        ends            int64 [num]: where these characters end in `tokens.data`
        character       a byte that is a character of the class
        """
        data = tokens.data.tobytes()
        ends_at, last = ends.tolist(), tokens.offsets[places + 1].tolist()
        texts = [data[end:until] for end, until in zip(ends_at, last, strict=True)]
        order = sorted(range(len(texts)), key=lambda i: (num_characters[i], texts[i]))
        sorted_texts = [texts[i] for i in order]
        offsets = np.zeros(len(order) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, sorted_texts), np.int64, len(order)), out=offsets[1:])
        counts = num_characters[order]
        joined = np.frombuffer(b"".join(sorted_texts), np.uint8)
        nodes, twins, before = lay_out(tokens.ids[places[order]], joined, offsets[:-1], np.diff(offsets), counts)
        begins = np.searchsorted(counts, np.arange(int(counts.max(initial=-1)) + 2))
        first = np.append(before, len(nodes))[begins].astype(np.int32)
        return cls(nodes, twins, first, int(nodes[:, 1].max(initial=0)), character)


@dataclass(frozen=True, eq=False)
class TokenIndex:
    """The sorted tokens of a vocabulary and their trie; about a second to build for 128k tokens, a few hundredths to
    load from disk.
    """

    tokens: SortedTokens
    trie: Trie

    @classmethod
    def of(cls, tokens: Sequence[bytes], fingerprint: str) -> TokenIndex:
        """The index of `tokens`, from disk where it is kept there under `fingerprint`."""
        folder = disk_cache.private_folder("vocabularies") if len(tokens) >= _FEWEST_TOKENS else None
        path = folder / f"{fingerprint}-{_FORMAT}.npz" if folder is not None else None
        found = disk_cache.load_arrays(path) if path is not None else None
        if found is not None:
            kept = SortedTokens(**{field.name: found[field.name] for field in fields(SortedTokens)})
            return cls(kept, Trie.of(found["nodes"], found["twins"]))
        ordered = SortedTokens.of(tokens)
        index = cls(ordered, Trie.build(ordered))
        if path is not None:
            disk_cache.save_arrays(path, {**vars(ordered), "nodes": index.trie.nodes, "twins": index.trie.twins})
            disk_cache.trim(path.parent, _KEPT)
        return index
