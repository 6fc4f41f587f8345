"""Router: selects the replica with the longest cached prefix of a prompt, within a bound on the load."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import numpy as np

BLOCK = 64
"""Tokens of a hashed block."""


class Router:
    """An approximation of each replica's prefix cache, as chained hashes of blocks of 64 tokens.

    slack     open prompt tokens by which a replica chosen for its prefix may exceed the least busy one
    capacity  blocks that are remembered; the least recently used go first
    """

    def __init__(self, slack: int, capacity: int = 200_000) -> None:
        self.load: dict[int, int] = {}  # open prompt tokens of each replica
        self._slack = slack
        self._capacity = capacity
        self._known: OrderedDict[int, set[int]] = OrderedDict()

    def add(self, replica: int) -> None:
        """Add a replica with an empty cache."""
        self.load[replica] = 0

    def forget(self, replica: int) -> None:
        """Remove a replica with its cached blocks."""
        self.load.pop(replica, None)
        for holders in self._known.values():
            holders.discard(replica)

    def forget_prefixes(self) -> None:
        """Forget the blocks of all replicas, whose caches were cleared."""
        self._known.clear()

    def choose(self, ids: np.ndarray, namespace: str = "") -> int:
        """Return the replica for a prompt; call `sent` once it is sent. Requires at least one replica."""
        matched: dict[int, int] = {}
        for depth, block in enumerate(_blocks(ids, namespace), 1):
            holders = self._known.get(block)
            if not holders:
                break
            matched |= dict.fromkeys(holders, depth)
        least = min(self.load.values())
        fit = [replica for replica, load in self.load.items() if load - least <= self._slack]
        return max(fit, key=lambda replica: (matched.get(replica, 0), -self.load[replica]))

    def sent(self, replica: int, ids: np.ndarray, namespace: str = "") -> None:
        """Count a prompt that goes to `replica`, and remember its blocks."""
        for block in _blocks(ids, namespace):
            self._known.setdefault(block, set()).add(replica)
            self._known.move_to_end(block)
        while len(self._known) > self._capacity:
            self._known.popitem(last=False)
        self.load[replica] += len(ids)

    def ended(self, replica: int, num_tokens: int) -> None:
        """Subtract a finished prompt of `num_tokens` from the load of `replica`."""
        if replica in self.load:
            self.load[replica] -= num_tokens


def _blocks(ids: np.ndarray, namespace: str) -> Iterator[int]:
    """Yield the hash of each whole block, chained with the preceding ones."""
    data, key = np.ascontiguousarray(ids, np.int32), hash(namespace)
    for start in range(0, len(data) - BLOCK + 1, BLOCK):
        key = hash((key, data[start : start + BLOCK].tobytes()))
        yield key
