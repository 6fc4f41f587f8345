"""CacheTiers: saves what the radix tree evicts, and brings it back for prompts that begin with it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from graftlm.core.kv.radix import Node, Peek, path_of
from graftlm.core.kv.tiers.block_copier import Run
from graftlm.core.kv.tiers.block_index import (
    BLOCK_TOKENS,
    BlockIndex,
    Entry,
    Ids,
    extend_keys,
    first_key,
)
from graftlm.core.kv.tiers.loads import HostTier, Load, Loads
from graftlm.core.metrics import TierStats
from graftlm.kernels.wire_plan import Extent, clip_range

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

    loads  whether it may begin a load: each waiting sequence does so once, for what it loads may be evicted again
    """

    ids: Ids
    keys: list[bytes]
    version: int = -1
    load: Load | None = None
    loads: bool = True


@dataclass(eq=False)
class _Pending:
    """Blocks to save before their slots are given back."""

    entries: list[Entry] = field(default_factory=list)
    extents: list[list[Extent]] = field(default_factory=list)


class CacheTiers:
    """The host tier behind one prefix cache.

    What the tree evicts is copied to rows of host memory. A waiting sequence with more of its prompt there than in the
    tree waits until it is copied into new slots, which the tree then owns; other sequences run meanwhile. So a tier
    holds no slots but those of loads under way: free + cached + in use, with loads, is all slots.
    """

    def __init__(self, cache: PrefixCache, host: HostTier) -> None:
        self.cache = cache
        self.host = host
        self.index = BlockIndex(host.rows.num_rows)
        self.states = BlockIndex(host.state_rows.num_rows if host.state_rows is not None else 0)
        self.stats = TierStats()
        self.loads = Loads(cache, host, self.index, self.states)
        self.paused = False
        self._version = 0
        self._pending = _Pending()
        self._looked: dict[int, Looked] = {}
        cache.tree.evicting = self._evicting
        if cache.states is not None:
            cache.states.evicting = self._save_state

    def snapshot(self) -> dict[str, TierStats]:
        """Return the figures of each tier."""
        index, stats = self.index, self.stats
        num_bytes = len(index) * self.host.copier.layout.num_bytes
        if self.host.state_copier is not None:
            num_bytes += len(self.states) * self.host.state_copier.layout.num_bytes
        held = replace(stats, tokens=index.num_tokens, bytes=num_bytes, dropped_blocks=index.num_dropped)
        return {"host": replace(held, loaded_tokens=self.loads.loaded_tokens)}

    # -- the tree evicts ---------------------------------------------------------------------------------------

    def _evicting(self, leaf: Node, keep: int) -> None:
        """Note the blocks of a leaf whose tokens from `keep` on are evicted. Their slots stay until `flush`."""
        if self.paused:
            return
        self._save_state(leaf)
        ids, extents = path_of(leaf)
        first = (len(ids) - leaf.num_tokens + keep) // BLOCK_TOKENS
        keys = [first_key(leaf.namespace)]
        extend_keys(keys, ids, len(ids) // BLOCK_TOKENS)
        entries: list[Entry] = []
        for block in range(first, -(-len(ids) // BLOCK_TOKENS)):
            start, stop = block * BLOCK_TOKENS, min((block + 1) * BLOCK_TOKENS, len(ids))
            data = ids[start:stop].tobytes()
            entry = self.index.covers(keys[block], data)
            if entry is None:
                entry = self.index.add(keys[block], data)
                if entry is None:
                    continue
                self._pending.entries.append(entry)
                self._pending.extents.append(clip_range(extents, start, stop))
                self.stats.saved_tokens += stop - start
                self._version += 1
            entries.append(entry)
        for entry in reversed(entries):  # the first blocks of a prefix are the last to go
            self.index.touch(entry)

    def flush(self) -> None:
        """Launch the copies of what was evicted; the slots may be given to others afterwards."""
        pending, self._pending = self._pending, _Pending()
        capacity = self.host.copier.capacity
        for at in range(0, len(pending.entries), capacity):
            runs: list[Run] = []
            for row, extents in enumerate(pending.extents[at : at + capacity]):
                offset = 0
                for start, stop in extents:
                    runs.append(Run(row, offset, start, stop - start))
                    offset += stop - start
            self.host.copier.save(runs, [self.host.rows.row(e.row) for e in pending.entries[at : at + capacity]])

    def _save_state(self, node: Node) -> None:
        """Save the state of a node before it is evicted."""
        states, copier, rows = self.cache.states, self.host.state_copier, self.host.state_rows
        if self.paused or states is None or copier is None or rows is None or not states.holds(node):
            return
        ids, _ = path_of(node)
        keys = [first_key(node.namespace)]
        extend_keys(keys, ids, len(ids) // BLOCK_TOKENS)
        key, rest = keys[-1], ids[(len(keys) - 1) * BLOCK_TOKENS :].tobytes()
        held = self.states.ending(key, rest)
        if held is not None and held.ids == rest:
            self.states.touch(held)
            return
        entry = self.states.add(key, rest, replaces=False)
        if entry is not None:
            assert node.state is not None
            copier.save([Run(0, 0, node.state, 1)], [rows.row(entry.row)])
            self._version += 1

    # -- a sequence waits --------------------------------------------------------------------------------------

    def awaits(self, sequence: Sequence, peek: Peek) -> bool:
        """Whether `sequence` waits for a part of its prompt, which is loaded from now on if there is room for it.

        peek  of the sequence; if this returns False it may have more in the tree than that
        """
        if not len(self.index) and not len(self.states):
            return False
        ids = sequence.ids[: sequence.first_logit]
        looked = self._looked.get(sequence.number)
        if looked is None or not np.array_equal(looked.ids, ids):
            if len(self._looked) >= REMEMBERED:
                self._looked.clear()
            looked = self._looked[sequence.number] = Looked(ids, [first_key(sequence.request.namespace)])
        if looked.load is not None:
            if not looked.load.done:
                return True
            looked.load = None
        if not looked.loads or looked.version == self._version:
            return False
        looked.version = self._version
        load = self._start(looked, sequence.request.namespace, peek)
        if load is None:
            return False
        looked.load = load
        self.poll()
        return not load.done

    def started(self, sequence: Sequence) -> None:
        """Forget the lookup for a sequence that waits no longer."""
        self._looked.pop(sequence.number, None)

    def _start(self, looked: Looked, namespace: str, peek: Peek) -> Load | None:
        """Begin to load what a tier holds beyond the tree; None if that is too little, or there is no room."""
        cache, ids = self.cache, looked.ids
        have = peek.length if cache.states is None else cache.tree.peek(ids, namespace).length
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
        self.loads.poll()
        self._evict_ahead()

    def clear(self) -> None:
        """Forget what host memory holds."""
        self.loads.settle()
        self.index.clear()
        self.states.clear()

    def close(self) -> None:
        """End all copies and give the memory back."""
        for copier, rows in ((self.host.copier, self.host.rows), (self.host.state_copier, self.host.state_rows)):
            if copier is not None and rows is not None:
                copier.synchronize()
                rows.close()

    def _evict_ahead(self) -> None:
        """On a GPU keep some slots free, a few blocks at a time, so that no step waits for copies of what it evicts."""
        cache, copier = self.cache, self.host.copier
        missing = cache.num_slots // FREE - cache.pool.num_free
        if copier.device.type == "cuda" and missing > 0 and cache.tree.num_evictable and copier.idle:
            cache.evict(min(missing, copier.capacity * BLOCK_TOKENS // 2))
