"""Loads: blocks of a tier on their way into slots of the pool, and into the radix tree when they have arrived."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from graftlm.core.kv.radix import Node
from graftlm.core.kv.tiers.block_copier import Arrival, BlockCopier, Run
from graftlm.core.kv.tiers.block_index import BLOCK_TOKENS, BlockIndex, Entry, Found, Ids
from graftlm.kernels.wire_plan import Extent, clip_range

if TYPE_CHECKING:
    from graftlm.core.kv.prefix_cache import PrefixCache
    from graftlm.core.kv.tiers.host_memory import HostRows


MOST_COPIES = 24
"""Copies that are launched and have not arrived: some 50 ms of them, so that they go on during a long step."""


class HostTier(NamedTuple):
    """Rows of host memory and the copier between them and the KV store; the same for states of layers that have one."""

    copier: BlockCopier
    rows: HostRows
    state_copier: BlockCopier | None = None
    state_rows: HostRows | None = None

    def register(self) -> None:
        """Begin to make the rows ready for a GPU, once the runtime's graphs are captured."""
        for rows in (self.rows, self.state_rows):
            if rows is not None:
                rows.register()


@dataclass(eq=False)
class Load:
    """Blocks on their way into slots.

    node       the locked node of the `have` tokens that the tree held
    found      the blocks of the tokens from the block of `have` on
    extents    new slots, for tokens [have, stop)
    state      the state after `stop` tokens, for a model that has layers with one
    kept       the locked node of all `stop` tokens once they are published, until the sequence starts that wanted them
    """

    ids: Ids
    namespace: str
    node: Node
    shared: list[Extent]
    have: int
    stop: int
    found: list[Found]
    extents: list[Extent]
    state: Entry | None
    kept: Node | None = None
    wanted: bool = True
    num_fetched: int = 0
    num_loaded: int = 0
    done: bool = False

    @property
    def entries(self) -> list[Entry]:
        """Return all that is read."""
        found = [one.entry for one in self.found]
        return found if self.state is None else [*found, self.state]


class Loads:
    """The loads under way, in the order in which they began. Their slots are in use until they are published."""

    def __init__(self, cache: PrefixCache, host: HostTier, index: BlockIndex, states: BlockIndex) -> None:
        self.cache = cache
        self.host = host
        self.index = index
        self.states = states
        self.loaded_tokens = 0
        self._loads: deque[Load] = deque()
        self._arrivals: deque[tuple[Load, Arrival, int]] = deque()

    def __len__(self) -> int:
        return len(self._loads)

    @property
    def num_slots(self) -> int:
        """Slots of loads under way."""
        return sum(load.stop - load.have for load in self._loads)

    def of(self, ids: Ids, namespace: str, have: int) -> Load | None:
        """Return the load under way that brings the tokens of `ids` after the first `have`, for another sequence."""
        for load in self._loads:
            if load.namespace == namespace and load.have <= have < min(load.stop, len(ids)):
                shared = min(load.stop, len(ids))
                if np.array_equal(load.ids[:shared], ids[:shared]):
                    return load
        return None

    def begin(self, ids: Ids, namespace: str, have: int, found: list[Found], state: Entry | None) -> Load | None:
        """Take slots for ids[have:] and begin to load them; None if there are too few.

        have   tokens that the tree holds now
        found  the blocks of these tokens, the one that token `have` lies in first
        state  the state after the last of them
        """
        stop = len(ids)
        match = self.cache.tree.match(ids[:have], namespace)
        assert match.length == have, "slots of the tree would not be those of their tokens"
        self.cache.tree.lock(match.node)
        load = Load(ids, namespace, match.node, match.extents, have, stop, found, [], state)
        for entry in load.entries:
            entry.readers += 1
        taken: list[Extent] | None = None
        try:
            taken = self._take(stop - have)
        finally:
            if taken is None:
                self._release(load)
        if taken is None:
            return None
        load.extents = taken
        self._loads.append(load)
        return load

    def _take(self, num_slots: int) -> list[Extent] | None:
        """Take slots, evicting others if need be; None if there are too few."""
        cache = self.cache
        if not num_slots:
            return []
        if num_slots > cache.num_available:
            return None
        if num_slots > cache.pool.num_free:
            cache.evict(num_slots - cache.pool.num_free)
        return cache.pool.allocate(num_slots)

    # -- blocks arrive -----------------------------------------------------------------------------------------

    def let_go(self, load: Load) -> None:
        """Let the tokens of a load be evicted, now or once they have arrived."""
        load.wanted = False
        if load.kept is not None:
            self.cache.tree.unlock(load.kept)
            load.kept = None

    def poll(self) -> None:
        """Count the blocks that have arrived, begin to copy the next ones, and publish what is complete. Never waits.

        Call between steps.
        """
        progress = True
        while progress:
            progress = False
            while self._arrivals and self._arrivals[0][1].done():
                load, _, num_blocks = self._arrivals.popleft()
                load.num_loaded += num_blocks
                progress = True
            for load in self._loads:
                while load.num_fetched < len(load.found) and len(self._arrivals) < MOST_COPIES:
                    self._fetch(load)
                    progress = True
            while self._loads and self._loads[0].num_loaded == len(self._loads[0].found):
                if self._loads[0].state is not None and self._states_wait():
                    break
                self._finish(self._loads.popleft())

    def wait(self) -> None:
        """Block until the next blocks have arrived, where nothing else can run."""
        if self._arrivals:
            self._arrivals[0][1].wait()
        self.poll()

    def settle(self) -> None:
        """Block until no load is under way, where nothing runs."""
        while self._loads:
            self.wait()

    def _states_wait(self) -> bool:
        """Whether a state cannot be written yet: copies of the next step may still read the slot that is taken."""
        return self.cache.states is not None and self.cache.states.copies_wait

    def _fetch(self, load: Load) -> None:
        """Begin to copy the next blocks of a load to the device."""
        first = load.num_fetched
        found = load.found[first : first + self.host.copier.capacity]
        pieces = self.host.rows.pieces([one.entry.row for one in found])
        runs: list[Run] = []
        base = load.have // BLOCK_TOKENS + first
        for row, one in enumerate(found):
            start = (base + row) * BLOCK_TOKENS
            low, high = max(start, load.have), min(start + one.num_tokens, load.stop)
            offset = low - start
            for extent in clip_range(load.extents, low - load.have, high - load.have):
                runs.append(Run(row, offset, extent.start, extent.size))
                offset += extent.size
        self._arrivals.append((load, self.host.copier.load(runs, pieces), len(found)))
        load.num_fetched += len(found)

    def _finish(self, load: Load) -> None:
        """Publish the loaded tokens."""
        cache = self.cache
        if load.stop > load.have:
            slots = [*load.shared, *load.extents]
            inserted = cache.tree.insert(load.ids, slots, owned_from=load.have, namespace=load.namespace)
            cache.pool.free(inserted.duplicates)
            if load.wanted:
                load.kept = inserted.node
                cache.tree.lock(inserted.node)
            self.loaded_tokens += load.stop - load.have
        load.extents = []
        if load.state is not None:
            self._load_state(load, load.state)
        self._release(load)

    def _load_state(self, load: Load, entry: Entry) -> None:
        states, copier, rows = self.cache.states, self.host.state_copier, self.host.state_rows
        assert states is not None and copier is not None and rows is not None
        node = self.cache.tree.match(load.ids, load.namespace).node
        if node.depth != load.stop or node.state is not None:
            return
        self.cache.tree.lock(node)
        slot = states.take()
        if slot is not None:
            arrival = copier.load([Run(0, 0, slot, 1)], rows.pieces([entry.row]))
            if copier.device.type == "cuda":
                arrival.order_before(torch.cuda.current_stream(copier.device))
            states.count(slot, load.stop)
            states.attach(node, slot)
        self.cache.tree.unlock(node)

    def _release(self, load: Load) -> None:
        load.done = True
        for entry in reversed(load.entries):
            entry.readers -= 1
            self.index.touch(entry)
            self.states.touch(entry)
        self.cache.tree.unlock(load.node)
