"""PrefixCache: the page pool and the radix tree as one. Sequences reserve, publish and release slots here."""

from __future__ import annotations

import itertools
from typing import Protocol

import numpy as np

from graftlm.core.config import CacheConfig
from graftlm.core.kv.pages import PagePool
from graftlm.core.kv.radix import Node, Peek, RadixTree, eviction_key
from graftlm.core.metrics import PrefixMiss
from graftlm.core.sequence import Sequence
from graftlm.kernels.wire_plan import Extent, clip_range

GROWTH = 64  # slots taken at once for tokens to come
MISS_TOKENS = 24  # how much of a missed prefix is kept for the report

PIECE = 64
"""Slots that an extent should have on average: each one more costs time in every step that its tokens are in."""

SPARE = 32
"""The part of the pool, one in SPARE, that an eviction frees beyond what is missing, so that extents are long."""

MAX_SPARE = 8
"""The free part of the pool above which nothing is evicted for longer extents."""


class SnapshotLane(Protocol):
    """A runner that keeps prefixes itself, as whole snapshots of a model's own cache."""

    def start(self, number: int, ids: np.ndarray, namespace: str, *, first_logit: int, num_prompt: int) -> int: ...
    def publish(self, number: int) -> None: ...
    def release(self, number: int) -> None: ...


class PrefixCache:
    """Owner of all KV slots: free + cached + in use == num_slots.

    lane  the serial lane's runner, which keeps prefixes itself: slots then only count memory, and the tree stays empty
    """

    def __init__(self, num_slots: int, config: CacheConfig, lane: SnapshotLane | None = None) -> None:
        self.pool = PagePool(num_slots // config.page_size * config.page_size)
        self.tree = RadixTree(page_size=config.page_size, key=eviction_key(config))
        self.enabled = config.enabled and lane is None
        self.lane = lane
        self._publishes = config.enabled
        self._pins: dict[int, Node] = {}
        self._pin_ids = itertools.count(1)

    @property
    def num_slots(self) -> int:
        return self.pool.num_slots

    @property
    def num_available(self) -> int:
        """Slots that are free or can be made free."""
        return self.pool.num_free + self.tree.num_evictable

    @property
    def num_in_use(self) -> int:
        return self.num_slots - self.pool.num_free - self.tree.num_tokens

    def peek(self, sequence: Sequence) -> Peek:
        """Where the cached prefix of `sequence` ends; the token whose logits are wanted is never part of it."""
        limit = sequence.first_logit if self.enabled else 0
        return self.tree.peek(sequence.ids[:limit], sequence.request.namespace)

    def start(self, sequence: Sequence) -> int:
        """Lock the cached prefix of `sequence` and make it the sequence's own beginning. -> its length in tokens"""
        ids, first_logit, namespace = sequence.ids, sequence.first_logit, sequence.request.namespace
        if self.lane is not None:
            num_prompt = sequence.num_prompt_tokens
            return self.lane.start(sequence.number, ids, namespace, first_logit=first_logit, num_prompt=num_prompt)
        if not self.enabled:
            return 0
        match = self.tree.match(ids[:first_logit], namespace)
        self.tree.lock(match.node)
        kv = sequence.kv
        kv.node, kv.shared, kv.num_shared = match.node, match.extents, match.length
        return match.length

    def miss(self, sequence: Sequence, peek: Peek) -> PrefixMiss | None:
        """Report where the prompt leaves the cache, and what is there; None on a full hit. Call before `start`."""
        if not self.enabled or peek.length == sequence.first_logit:
            return None
        rest = sequence.prompt_ids[peek.length : peek.length + MISS_TOKENS]
        cached = self.tree.continuation(peek, MISS_TOKENS)
        shared = sequence.prompt_ids[max(0, peek.length - MISS_TOKENS) : peek.length]
        return PrefixMiss(peek.length, tuple(shared.tolist()), tuple(cached.tolist()), tuple(rest.tolist()))

    def reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make room for the first `num_tokens` tokens of `sequence`; False, changing nothing, if there is none.

        Slots are taken in whole pages, so that none lies in two extents: the tree keeps a page in one piece.
        """
        kv, page_size = sequence.kv, self.tree.page_size
        missing = -(-(num_tokens - kv.capacity) // page_size) * page_size
        if missing <= 0:
            return True
        if missing > self.pool.num_free:
            if missing > self.num_available:
                return False
            self._evict(missing - self.pool.num_free + self.num_slots // SPARE)
        if kv.own and (more := self.pool.grow(kv.own[-1], missing)):
            kv.own[-1] = Extent(kv.own[-1].start, more.stop)
            missing -= more.size
        if missing:
            crumbs = self.pool.num_pieces(missing) > 1 + missing // PIECE
            if crumbs and self.pool.num_free < self.num_slots // MAX_SPARE:
                self._evict(self.num_slots // SPARE)
            taken = self.pool.allocate(missing)
            assert taken is not None
            kv.own.extend(taken)
        return True

    def publish(self, sequence: Sequence) -> None:
        """Put what `sequence` has computed into the tree, in whole pages, for others to use."""
        kv, num_computed = sequence.kv, sequence.progress.num_computed
        if self.lane is not None:
            if self._publishes and num_computed >= sequence.num_prompt_tokens:
                self.lane.publish(sequence.number)
            return
        known = min(num_computed, sequence.num_tokens)  # the tree's keys are ids, and later ones are not known
        length = known - known % self.tree.page_size
        if not self.enabled or length <= kv.num_shared:
            return
        slots, namespace = [*kv.shared, *kv.own], sequence.request.namespace
        inserted = self.tree.insert(sequence.ids[:length], slots, owned_from=kv.num_shared, namespace=namespace)
        self.pool.free(inserted.duplicates)
        kv.own = clip_range(kv.own, length - kv.num_shared, self.num_slots)
        self.tree.lock(inserted.node)
        if kv.node is not None:
            self.tree.unlock(kv.node)
        kv.node, kv.shared, kv.num_shared = inserted.node, inserted.extents, length

    def release(self, sequence: Sequence, *, publish: bool) -> None:
        """Give back all that `sequence` holds, after publishing what it has computed if `publish`."""
        if publish:
            self.publish(sequence)
        if self.lane is not None:
            self.lane.release(sequence.number)
        kv = sequence.kv
        self.pool.free(kv.own)
        if kv.node is not None:
            self.tree.unlock(kv.node)
        kv.node, kv.shared, kv.num_shared, kv.own = None, [], 0, []

    def clear(self) -> None:
        """Evict all that is neither in use nor pinned."""
        self._evict(self.tree.num_evictable)

    def _evict(self, num_tokens: int) -> None:
        """Free the slots of at least `num_tokens` cached tokens, or of all that are unlocked. Only this evicts."""
        self.pool.free(self.tree.evict(num_tokens))

    def pin(self, sequence: Sequence) -> int | None:
        """Keep what `sequence` has published from eviction. -> what `unpin` takes; None where nothing is cached"""
        node = sequence.kv.node
        if node is None:
            return None
        self.tree.lock(node)
        pin = next(self._pin_ids)
        self._pins[pin] = node
        return pin

    def unpin(self, pin: int) -> None:
        """Let a pinned prefix be evicted again; one that is not pinned any more is left alone."""
        node = self._pins.pop(pin, None)
        if node is not None:
            self.tree.unlock(node)

    def check_integrity(self, running: list[Sequence]) -> None:
        """Raise AssertionError unless every slot is owned once. For tests."""
        self.tree.check_integrity()
        owned = sum(e.size for sequence in running for e in sequence.kv.own)
        assert self.num_in_use == owned, f"{self.num_in_use} slots in use, {owned} owned"
