"""BlockIndex: which blocks of which prefixes a tier holds, and in which of its rows.

A block is up to 64 tokens that begin at a multiple of 64. The key of a full block is a digest of the key before it and
its ids, so a key names a whole prefix, and no tree is kept. A block is found by the key before it and its ids; of one
that differs, the tokens before the difference can be used.
"""

from __future__ import annotations

import hashlib
from itertools import islice
from typing import NamedTuple

import numpy as np

BLOCK_TOKENS = 64
BLOCK_BYTES = 4 * BLOCK_TOKENS
"""Bytes of the ids of a full block."""

SIBLINGS = 64
"""The newest blocks after one key that are compared with a prompt that has none of them whole."""

Ids = np.ndarray  # int32 [num_tokens]


def first_key(namespace: str, context: bytes = b"") -> bytes:
    """Return the key before the first block. context: everything else that changes a number"""
    return hashlib.blake2b(context + b"\0" + namespace.encode(), digest_size=16).digest()


def next_key(key: bytes, ids: bytes) -> bytes:
    """Return the key after a full block of these ids."""
    return hashlib.blake2b(key + ids, digest_size=16).digest()


def extend_keys(keys: list[bytes], ids: Ids, num_blocks: int) -> None:
    """Append keys until `keys`, which begins with the first key, holds those before and after `num_blocks` blocks."""
    data = np.ascontiguousarray(ids[: num_blocks * BLOCK_TOKENS], np.int32).tobytes()
    for index in range(len(keys) - 1, min(num_blocks, len(data) // BLOCK_BYTES)):
        keys.append(next_key(keys[-1], data[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES]))


class Entry:
    """A block in a tier: the key before it, its ids as bytes of int32, and its row. readers: copies under way"""

    __slots__ = ("key", "ids", "row", "readers")

    def __init__(self, key: bytes, ids: bytes, row: int) -> None:
        self.key = key
        self.ids = ids
        self.row = row
        self.readers = 0


class Found(NamedTuple):
    """A block that holds the next `num_tokens` tokens of a prompt."""

    entry: Entry
    num_tokens: int


class BlockIndex:
    """The blocks of a tier with `num_rows` rows, least recently used first. version: grows with each new block"""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.num_tokens = 0
        self.num_dropped = 0
        self.version = 0
        self._free = list(range(num_rows - 1, -1, -1))
        self._after: dict[bytes, dict[bytes, Entry]] = {}
        self._used: dict[Entry, None] = {}  # in order of their last use

    def __len__(self) -> int:
        return len(self._used)

    def extend(self, num_rows: int) -> None:
        """Have `num_rows` rows from now on."""
        self._free[:0] = range(num_rows - 1, self.num_rows - 1, -1)
        self.num_rows = max(num_rows, self.num_rows)

    def covers(self, key: bytes, ids: bytes) -> Entry | None:
        """Return the block after `key` that begins with `ids`, if there is one."""
        after = self._after.get(key)
        if after is None:
            return None
        whole = after.get(ids)
        if whole is not None or len(ids) == BLOCK_BYTES:
            return whole
        return next((entry for entry in _newest(after) if entry.ids.startswith(ids)), None)

    def find(self, key: bytes, ids: bytes) -> Found | None:
        """Return the block after `key` that holds the most of `ids`, at most a full block's; None if none begins so."""
        after = self._after.get(key)
        if after is None:
            return None
        whole = after.get(ids)
        if whole is not None:
            return Found(whole, len(ids) // 4)
        best, most = None, 0
        for entry in _newest(after):
            common = common_ids(entry.ids, ids)
            if common > most:
                best, most = entry, common
        return Found(best, most) if best is not None else None

    def longest(self, keys: list[bytes], ids: Ids, first: int) -> list[Found]:
        """Return the blocks that hold `ids` from block `first` on, as far as there are any.

        keys  of as many blocks of `ids` as are full; more are appended as far as they are needed
        """
        found: list[Found] = []
        extend_keys(keys, ids, first)
        data = np.ascontiguousarray(ids, np.int32).tobytes()
        for index in range(first, -(-len(ids) // BLOCK_TOKENS)):
            piece = data[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES]
            one = self.find(keys[index], piece)
            if one is None:
                break
            found.append(one)
            if one.num_tokens < BLOCK_TOKENS:
                break
            if len(keys) == index + 1:
                keys.append(next_key(keys[index], piece))
        return found

    def ending(self, key: bytes, ids: bytes) -> Entry | None:
        """Return the entry after `key` whose ids, perhaps none, are the longest beginning of `ids`."""
        after = self._after.get(key, {})
        return max((e for e in after.values() if ids.startswith(e.ids)), key=lambda e: len(e.ids), default=None)

    def add(self, key: bytes, ids: bytes, *, replaces: bool = True) -> Entry | None:
        """Take a row for a new block, that of the least recently used block if need be; None if all are being read.

        replaces  drop blocks whose ids are the beginning of these
        """
        entry = self.reserve(key, ids)
        if entry is not None:
            self.show(entry, replaces=replaces)
        return entry

    def reserve(self, key: bytes, ids: bytes) -> Entry | None:
        """Take a row for a block that no lookup finds until `show`; None if all are being read."""
        if not self._free:
            oldest = next((entry for entry in self._used if not entry.readers), None)
            if oldest is None:
                return None
            self.drop(oldest)
            self.num_dropped += 1
        entry = Entry(key, ids, self._free.pop())
        self._used[entry] = None
        self.num_tokens += len(ids) // 4
        return entry

    def show(self, entry: Entry, *, replaces: bool = True) -> None:
        """Let lookups find a reserved block; it is dropped if there is one of the same ids meanwhile."""
        key, ids = entry.key, entry.ids
        if ids in self._after.get(key, {}):
            self.drop(entry)
            return
        for older in _newest(self._after.get(key, {})) if replaces else ():
            if ids.startswith(older.ids) and not older.readers:
                self.drop(older)
        self._after.setdefault(key, {})[ids] = entry
        self.version += 1

    def touch(self, entry: Entry) -> None:
        """Count a block as used."""
        if entry in self._used:
            self._used[entry] = self._used.pop(entry)

    def drop(self, entry: Entry) -> None:
        """Forget a block and free its row."""
        after = self._after.get(entry.key, {})
        if after.get(entry.ids) is entry:
            del after[entry.ids]
            if not after:
                del self._after[entry.key]
        del self._used[entry]
        self._free.append(entry.row)
        self.num_tokens -= len(entry.ids) // 4

    def clear(self) -> None:
        """Forget all blocks that are not being read."""
        for entry in [entry for entry in self._used if not entry.readers]:
            self.drop(entry)

    def check_integrity(self) -> None:
        """Raise AssertionError unless free + used == all rows. For tests."""
        rows = [*self._free, *(entry.row for entry in self._used)]
        assert sorted(rows) == list(range(self.num_rows))
        assert {entry for after in self._after.values() for entry in after.values()} <= set(self._used)
        assert self.num_tokens == sum(len(entry.ids) // 4 for entry in self._used)


def _newest(after: dict[bytes, Entry]) -> list[Entry]:
    return list(islice(reversed(after.values()), SIBLINGS))


def common_ids(a: bytes, b: bytes) -> int:
    """Return how many ids two blocks begin with alike."""
    size = min(len(a), len(b))
    if a[:4] != b[:4]:
        return 0
    different = np.flatnonzero(np.frombuffer(a[:size], np.int32) != np.frombuffer(b[:size], np.int32))
    return int(different[0]) if different.size else size // 4
