"""CacheTiers: host memory and files behind one prefix cache, as the scheduler and the cache see them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from graftlm.core.kv.radix import Node, Peek
from graftlm.core.kv.tiers.block_index import BLOCK_TOKENS, Entry, Ids, extend_keys, first_key
from graftlm.core.kv.tiers.folder import BlockFolder, FileKey, Reading
from graftlm.core.kv.tiers.folder_tier import FolderTier
from graftlm.core.kv.tiers.loads import HostTier, Load, Loads
from graftlm.core.kv.tiers.saves import Saves
from graftlm.core.metrics import TierStats

if TYPE_CHECKING:
    from graftlm.core.kv.prefix_cache import PrefixCache
    from graftlm.core.sequence import Sequence

LEAST = 16
"""Tokens that a tier must hold beyond the tree's for a prompt to be loaded: fewer are computed as fast."""

FREE = 16
"""On a GPU slots are evicted ahead of need while less than one in FREE is free: copies then delay no step."""

REMEMBERED = 4096
"""Waiting sequences whose last lookup is remembered."""


@dataclass(eq=False, slots=True)
class Looked:
    """The last lookup for a waiting sequence: its ids and the keys of their blocks, and what became of it.

    loads, reads  whether it may begin a load or read files: each waiting sequence does so once, for what it loads may
                  be evicted again
    kept          its load that is done, whose tokens are not evicted before the sequence starts
    """

    ids: Ids
    keys: list[bytes]
    version: int = -1
    load: Load | None = None
    loads: bool = True
    kept: Load | None = None
    reading: Reading | None = None
    reads: bool = True


class CacheTiers:
    """The tiers behind one prefix cache: host memory, and files behind that.

    What the tree evicts is copied to rows of host memory. A waiting sequence with more of its prompt there than in the
    tree waits until it is copied into new slots, which the tree then owns; other sequences run meanwhile. So a tier
    holds no slots but those of loads under way: free + cached + in use, with loads, is all slots.
    """

    def __init__(self, cache: PrefixCache, host: HostTier, files: BlockFolder | None = None) -> None:
        self.cache = cache
        self.host = host
        self.saves = Saves(cache, host)
        self.index, self.states = self.saves.index, self.saves.states
        self.loads = Loads(cache, host, self.index, self.states)
        self.folder = FolderTier(cache, host, self.saves, files) if files is not None else None
        self.saves.folder = self.folder
        self.paused = False
        self._looked: dict[int, Looked] = {}
        cache.tree.evicting = self._evicting
        if cache.states is not None:
            cache.states.evicting = self._evicting_state

    @property
    def busy(self) -> bool:
        """Whether blocks are on their way for sequences that wait."""
        return bool(self.loads) or (self.folder is not None and self.folder.reading)

    def snapshot(self) -> dict[str, TierStats]:
        """Return the figures of each tier."""
        index, host = self.index, self.host
        self.saves.extend()
        num_bytes, capacity = (num * host.copier.layout.num_bytes for num in (len(index), index.num_rows))
        if host.state_copier is not None:
            num_bytes += len(self.states) * host.state_copier.layout.num_bytes
            capacity += self.states.num_rows * host.state_copier.layout.num_bytes
        tiers = {
            "host": TierStats(
                index.num_tokens,
                num_bytes,
                self.saves.num_tokens,
                self.loads.loaded_tokens,
                index.num_dropped,
                capacity,
            )
        }
        if self.folder is not None:
            files = self.folder.files
            tiers["folder"] = TierStats(
                files.num_tokens,
                files.held_bytes,
                files.saved_tokens,
                files.loaded_tokens,
                files.num_dropped,
                files.num_bytes,
            )
        return tiers

    # -- the tree evicts ---------------------------------------------------------------------------------------

    def _evicting(self, leaf: Node, keep: int) -> None:
        """Note the blocks of a leaf whose tokens from `keep` on are evicted. Their slots stay until `flush`."""
        if self.paused:
            return
        self.saves.state(leaf)
        written = self.folder is not None and self.folder.evicted(leaf)
        self.saves.leaf(leaf, keep, FileKey if written else None)

    def _evicting_state(self, node: Node) -> None:
        if not self.paused:
            self.saves.state(node)

    # -- a sequence waits --------------------------------------------------------------------------------------

    def awaits(self, sequence: Sequence, peek: Peek) -> bool:
        """Whether `sequence` waits for a part of its prompt, which is loaded from now on if there is room for it.

        peek  of the sequence; if this returns False it may have more in the tree than that
        """
        if not len(self.index) and not len(self.states) and self.folder is None:
            return False
        ids = sequence.ids[: sequence.first_logit]
        looked = self._looked.get(sequence.number)
        if looked is None or not np.array_equal(looked.ids, ids):
            self._forget(sequence)
            if len(self._looked) >= REMEMBERED:
                self._looked = {number: one for number, one in self._looked.items() if one.load or one.kept}
            looked = self._looked[sequence.number] = Looked(ids, [first_key(sequence.request.namespace)])
        if looked.load is not None:
            if not looked.load.done:
                return True
            looked.kept = looked.load if not looked.loads and looked.load.kept is not None else None
            looked.load = None
        if looked.reading is not None and self.folder is not None:
            if not looked.reading.done and not self.folder.late(looked.reading):
                return True
            looked.reading = None
        elif looked.reads and self.folder is not None:
            looked.reads = False
            looked.reading = self.folder.read(
                ids, looked.keys, _held(self.cache, looked, sequence.request.namespace, peek)
            )
            if looked.reading is not None:
                return True
        version = self.index.version + self.states.version
        if not looked.loads or looked.version == version:
            return False
        looked.version = version
        load = self._start(looked, sequence.request.namespace, peek)
        if load is None:
            return False
        looked.load = load
        self.poll()
        return not load.done

    def arriving(self, sequence: Sequence) -> bool:
        """Whether a part of the prompt of `sequence` is on its way."""
        looked = self._looked.get(sequence.number)
        if looked is None:
            return False
        load, reading = looked.load, looked.reading
        return (load is not None and not load.done) or (
            reading is not None and self.folder is not None and not reading.done and not self.folder.late(reading)
        )

    def missing(self, sequence: Sequence) -> int:
        """Return how many tokens of a sequence will need slots that its load has not taken."""
        looked = self._looked.get(sequence.number)
        load = looked.load if looked is not None else None
        return sequence.num_tokens - (load.stop if load is not None else 0)

    def started(self, sequence: Sequence, node: Node | None) -> None:
        """Forget the lookup for a sequence that starts after the cached tokens up to `node`."""
        self._forget(sequence)
        if self.folder is not None and node is not None:
            self.folder.used(node, reused=True)

    def left(self, sequence: Sequence) -> None:
        """Let the prefix of a sequence that will not start be evicted."""
        if sequence.number in self._looked:
            self._forget(sequence)

    def let_go(self) -> bool:
        """Let all loaded prefixes of waiting sequences be evicted; False if there are none."""
        kept = [one.kept for one in self._looked.values() if one.kept is not None]
        for load in kept:
            self.loads.let_go(load)
        for looked in self._looked.values():
            looked.kept = None
        return bool(kept)

    def _forget(self, sequence: Sequence) -> None:
        looked = self._looked.pop(sequence.number, None)
        if looked is None:
            return
        for load in (looked.load, looked.kept):
            if load is not None and not looked.loads:
                self.loads.let_go(load)

    def ended(self, node: Node) -> None:
        """Note what a sequence has published."""
        if self.folder is not None:
            self.folder.used(node, reused=False)

    def _start(self, looked: Looked, namespace: str, peek: Peek) -> Load | None:
        """Begin to load what a tier holds beyond the tree; None if that is too little, or there is no room."""
        cache, ids = self.cache, looked.ids
        have = _held(self.cache, looked, namespace, peek)
        found = self.index.longest(looked.keys, ids, have // BLOCK_TOKENS)
        stop = max(have, have // BLOCK_TOKENS * BLOCK_TOKENS + sum(one.num_tokens for one in found))
        stop -= stop % cache.tree.page_size
        state: Entry | None = None
        if cache.states is not None:
            state, stop = self._last_state(looked, stop, peek.length)
            if state is None or not cache.states.available:
                return None
            have = min(have, stop)
        if stop - peek.length < LEAST:
            return None
        if stop > have and (other := self.loads.of(ids[:stop], namespace, have)) is not None:
            looked.version = -1  # what is left is looked up afterwards
            return other
        found = found[: -(-stop // BLOCK_TOKENS) - have // BLOCK_TOKENS] if stop > have else []
        load = self.loads.begin(ids[:stop].copy(), namespace, have, found, state)
        looked.loads = load is None
        return load

    def _last_state(self, looked: Looked, stop: int, above: int) -> tuple[Entry | None, int]:
        """Return the last saved state within the first `stop` tokens and its number of tokens."""
        ids, keys = looked.ids, looked.keys
        extend_keys(keys, ids, stop // BLOCK_TOKENS)
        for block in range(stop // BLOCK_TOKENS, above // BLOCK_TOKENS - 1, -1):
            start = block * BLOCK_TOKENS
            entry = self.states.ending(keys[block], ids[start : min(start + BLOCK_TOKENS, stop)].tobytes())
            if entry is not None and start + len(entry.ids) // 4 > above:
                return entry, start + len(entry.ids) // 4
        return None, above

    def poll(self) -> None:
        """Publish the loads that have arrived and go on with the others. Never waits. Call between steps."""
        self.saves.extend()
        if self.folder is not None:
            self.folder.poll()
        self.loads.poll()
        self._evict_ahead()

    def wait(self) -> None:
        """Block until the next blocks have arrived, or for a moment, where nothing else can run."""
        if self.loads or self.folder is None:
            self.loads.wait()
        else:
            self.folder.wait()

    def rest(self) -> None:
        """Save some of what is worth a file, where nothing runs."""
        if self.folder is not None:
            self.folder.rest()

    def clear(self) -> None:
        """Forget what host memory holds."""
        self.loads.settle()
        self.index.clear()
        self.states.clear()

    def close(self) -> None:
        """Write what is worth a file, end all copies and give the memory back."""
        if self.folder is not None:
            self.folder.close()
        for copier, rows in ((self.host.copier, self.host.rows), (self.host.state_copier, self.host.state_rows)):
            if copier is not None and rows is not None:
                copier.synchronize()
                rows.close()

    def _evict_ahead(self) -> None:
        """On a GPU keep some slots free, a few blocks at a time, so that no step waits for copies of what it evicts."""
        cache, copier = self.cache, self.host.copier
        missing = cache.num_slots // FREE - cache.pool.num_free
        if copier.device.type == "cuda" and missing > 0 and cache.tree.num_evictable and (room := copier.room):
            cache.evict(min(missing, room * BLOCK_TOKENS // 2))


def _held(cache: PrefixCache, looked: Looked, namespace: str, peek: Peek) -> int:
    """Return how many tokens the tree holds, whether or not it has a state after them."""
    return peek.length if cache.states is None else cache.tree.peek(looked.ids, namespace).length
