"""PrefixCache: the page pool and the radix tree as one. Sequences reserve, publish and release slots here."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from graftlm.core.config import CacheConfig
from graftlm.core.errors import EngineError
from graftlm.core.kv.pages import PagePool
from graftlm.core.kv.prompt_modules import PromptModules
from graftlm.core.kv.radix import Node, Peek, RadixTree, eviction_key
from graftlm.core.kv.states import MOVING, StateSlots
from graftlm.core.kv.waits import Waits
from graftlm.core.metrics import PrefixMiss
from graftlm.core.sequence import HeldSlots, Sequence
from graftlm.kernels.wire_plan import Extent, clip_range

if TYPE_CHECKING:
    from graftlm.core.execution.step_plan import StepPlan
    from graftlm.core.kv.tiers.cache_tiers import CacheTiers

GROWTH = 64  # slots taken at once for tokens to come
MISS_TOKENS = 24  # how much of a missed prefix is kept for the report

PIECE = 64
"""Slots that an extent should have on average: each one more costs time in every step that its tokens are in."""

SPARE = 32
"""The part of the pool, one in SPARE, that an eviction frees beyond what is missing, so that extents are long."""

MAX_SPARE = 8
"""The free part of the pool above which nothing is evicted for longer extents."""


CERTAIN = 4
"""Ids of a span that a cached prefix must share with it: each holds 31 bits of the span's digest."""


def _certain(sequence: Sequence, length: int) -> int:
    """Cut a match that ends among the first ids of a span, which other spans may have by chance."""
    spans = sequence.prompt.spans
    before = bisect_left(spans, length, key=lambda span: span.start)
    if before and length < min((last := spans[before - 1]).stop, last.start + CERTAIN):
        return last.start
    return length


def _peek(tree: RadixTree, ids: np.ndarray, namespace: str, with_state: bool) -> Peek:
    if not with_state:
        return tree.peek(ids, namespace)
    found = tree.find_state(ids, namespace)
    return Peek(found.node, found.length, None, 0)


def _keep_nothing(node: Node) -> None:
    pass


class SnapshotLane(Protocol):
    """A runner that keeps prefixes itself, as whole snapshots of a model's own cache."""

    def start(self, number: int, ids: np.ndarray, namespace: str, *, first_logit: int, num_prompt: int) -> int: ...
    def publish(self, number: int) -> None: ...
    def release(self, number: int) -> None: ...


class PrefixCache:
    """Owner of all KV slots: free + cached + in use == num_slots.

    lane  the serial lane's runner, which keeps prefixes itself: slots then only count memory, and the tree stays empty
    tiers  host memory behind the tree, set once there is any
    num_states  slots in the pool of states, for a model that has layers with a state; 0 for all others. A cached prefix
                then ends at the last node whose state is cached
    """

    def __init__(
        self, num_slots: int, config: CacheConfig, lane: SnapshotLane | None = None, num_states: int = 0
    ) -> None:
        self.pool = PagePool(num_slots // config.page_size * config.page_size)
        self._pins: dict[int, Node] = {}
        self._pinned: Counter[Node] = Counter()
        self.states = StateSlots(num_states, self._pinned) if num_states else None
        forget = self.states.forget if self.states is not None else _keep_nothing
        self.tree = RadixTree(page_size=config.page_size, key=eviction_key(config), forget=forget)
        self.modules = PromptModules(self.tree)
        self.enabled = config.enabled and lane is None
        self.lane = lane
        self._publishes = config.enabled
        self._pin_ids = itertools.count(1)
        self.tiers: CacheTiers | None = None
        self.waits = Waits(self.tree, lambda: self.tiers is not None)

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

    def peek(self, sequence: Sequence, *, cut: bool = True) -> Peek:
        """Return the end of the cached prefix of `sequence`; the token whose logits are wanted is never part of it.

        cut  whether a match that ends among the first ids of a span is cut to its start
        """
        limit = sequence.first_logit if self.enabled else 0
        namespace = sequence.request.namespace
        if sequence.prompt.modules:
            return Peek(self.tree.root(namespace), sum(sequence.prompt.modules), None, 0)
        found = _peek(self.tree, sequence.ids[:limit], namespace, self.states is not None)
        certain = _certain(sequence, found.length) if cut else found.length
        if certain == found.length:
            return found
        return _peek(self.tree, sequence.ids[:certain], namespace, self.states is not None)

    def start(self, sequence: Sequence) -> int:
        """Lock the cached prefix of `sequence` and make it the sequence's own beginning. -> its length in tokens"""
        ids, first_logit, namespace = sequence.ids, sequence.first_logit, sequence.request.namespace
        if self.lane is not None:
            num_prompt = sequence.num_prompt_tokens
            return self.lane.start(sequence.number, ids, namespace, first_logit=first_logit, num_prompt=num_prompt)
        if not self.enabled:
            self._start_state(sequence, None)
            return 0
        if sequence.prompt.modules:
            sequence.kv.shared, sequence.kv.num_shared = self.modules.extents(sequence), sum(sequence.prompt.modules)
            return sequence.kv.num_shared
        limit = self.peek(sequence).length if sequence.prompt.spans else first_logit
        match = self.tree.match(ids[:limit], namespace, with_state=self.states is not None)
        if self.waits:
            self.waits.started(ids[:limit], namespace)
        if self.tiers is not None:
            self.tiers.started(sequence, match.node)
        self._start_state(sequence, match.node)
        self.tree.lock(match.node)
        kv = sequence.kv
        kv.node, kv.shared, kv.num_shared = match.node, match.extents, match.length
        return match.length

    def miss(self, sequence: Sequence, peek: Peek) -> PrefixMiss | None:
        """Report where the prompt leaves the cache, and what is there; None on a full hit. Call before `start`."""
        if not self.enabled or peek.length == sequence.first_logit or sequence.prompt.modules:
            return None
        num_cached = peek.length
        if self.states is not None:
            peek = self.tree.peek(sequence.ids[: sequence.first_logit], sequence.request.namespace)
        rest = sequence.prompt_ids[peek.length : peek.length + MISS_TOKENS]
        cached = self.tree.continuation(peek, MISS_TOKENS)
        shared = sequence.prompt_ids[max(0, peek.length - MISS_TOKENS) : peek.length]
        parts = tuple(shared.tolist()), tuple(cached.tolist()), tuple(rest.tolist())
        return PrefixMiss(peek.length, *parts, num_without_state=peek.length - num_cached)

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
            self.evict(missing - self.pool.num_free + self.num_slots // SPARE)
        if kv.own and (more := self.pool.grow(kv.own[-1], missing)):
            kv.own[-1] = Extent(kv.own[-1].start, more.stop)
            missing -= more.size
        if missing:
            crumbs = self.pool.num_pieces(missing) > 1 + missing // PIECE
            if crumbs and self.pool.num_free < self.num_slots // MAX_SPARE:
                self.evict(self.num_slots // SPARE)
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
        if not self.enabled or length <= kv.num_shared or sequence.prompt.modules:
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
        self._end_state(sequence, keep=publish)
        self.pool.free(kv.own)
        if kv.node is not None:
            self.tree.unlock(kv.node)
            if publish:
                self.waits.finished(sequence.request.id, kv.node, sequence.num_prompt_tokens)
            if self.tiers is not None:
                self.tiers.ended(kv.node)
        kv.node, kv.shared, kv.num_shared, kv.own = None, [], 0, []

    # -- states of layers that have one ------------------------------------------------------------------------

    @property
    def has_state_room(self) -> bool:
        """Whether one more sequence can have a state."""
        return self.states is None or self.states.available

    def _start_state(self, sequence: Sequence, node: Node | None) -> None:
        """Give `sequence` a copy of the state of `node`; of None, or a root, the state before any token."""
        if self.states is None:
            return
        source = None if node is None else node.state
        if node is not None:
            self.states.touch(node)
        slot = self.states.take()
        if slot is None:
            raise EngineError("all states are in use or pinned")
        self.states.copy(slot, source)
        sequence.kv.state = slot

    def _end_state(self, sequence: Sequence, *, keep: bool) -> None:
        """Make the state of `sequence` the checkpoint of its last published token, or free it."""
        kv = sequence.kv
        if self.states is None or kv.state is None:
            return
        if keep and self._may_attach(kv, kv.state):
            assert kv.node is not None
            self.states.attach(kv.node, kv.state)
        else:
            self.states.give(kv.state)
        kv.state = None

    def _may_attach(self, kv: HeldSlots, slot: int) -> bool:
        """Whether the state in `slot` is of the last token that `kv` has published, and the first of its node."""
        assert self.states is not None
        if not self.enabled or kv.node is None or kv.num_shared == 0:
            return False
        return kv.node.state is None and self.states.consumed(slot) == kv.num_shared

    def checkpoint(self, sequence: Sequence) -> None:
        """Keep a copy of the state of `sequence` at its last published token, if there is room for one."""
        kv = sequence.kv
        if self.states is None or kv.state is None or not self._may_attach(kv, kv.state):
            return
        slot = self.states.take()
        if slot is not None:
            assert kv.node is not None
            self.states.copy(slot, kv.state)
            self.states.attach(kv.node, slot)

    def with_states(self, plan: StepPlan) -> StepPlan:
        """Name the slots of the rows' states in the step. Raises EngineError for a state of another token."""
        states = self.states
        if states is None:
            return plan
        slots: list[int] = []
        for row in plan.rows:
            slot = row.sequence.kv.state
            consumed = states.consumed(slot) if slot is not None else None
            if slot is None or consumed != row.past:
                raise EngineError(f"a row of {row.past} tokens has the state after {consumed}")
            states.count(slot, MOVING)
            slots.append(slot)
        wire = replace(plan.wire, state_slots=np.array(slots, np.int64), state_copies=states.send())
        return replace(plan, wire=wire)

    def advance(self, sequence: Sequence, num_tokens: int) -> None:
        """Note that a launched step takes the state of `sequence` to its first `num_tokens` tokens."""
        if self.states is not None and sequence.kv.state is not None:
            self.states.confirm()
            self.states.count(sequence.kv.state, num_tokens)

    def is_ahead(self, sequence: Sequence) -> bool:
        """Whether the state of `sequence` has consumed other tokens than its KV holds, because it was rewound."""
        slot = sequence.kv.state
        if self.states is None or slot is None:
            return False
        return self.states.consumed(slot) != sequence.progress.num_computed

    def check_idle(self) -> None:
        """Raise unless all slots and states were given back, and new checkpoints are of their nodes' last tokens."""
        if self.tiers is not None:
            self.tiers.loads.settle()
        assert self.num_in_use == 0, f"{self.num_in_use} slots were not given back"
        if self.states is not None:
            assert self.states.num_in_use == 0, f"{self.states.num_in_use} states were not given back"
            self.states.check_new()

    def clear(self) -> None:
        """Evict all that is neither in use nor pinned, and empty the host tier."""
        if self.tiers is not None:
            self.tiers.clear()
            self.tiers.paused = True
        self.evict(self.tree.num_evictable)
        if self.states is not None:
            self.states.clear(self._pinned)
        if self.tiers is not None:
            self.tiers.paused = False

    def evict(self, num_tokens: int) -> None:
        """Free the slots of at least `num_tokens` cached tokens, or of all that are unlocked. Only this evicts."""
        if self.waits:
            self.waits.expire()
        freed = self.tree.evict(num_tokens)
        if self.tiers is not None:
            self.tiers.saves.flush()
        self.pool.free(freed)

    def pin(self, sequence: Sequence) -> int | None:
        """Keep what `sequence` has published from eviction. -> what `unpin` takes; None where nothing is cached"""
        node = sequence.kv.node
        if node is None:
            return None
        self.checkpoint(sequence)
        self.tree.lock(node)
        pin = next(self._pin_ids)
        self._pins[pin] = node
        self._pinned[node] += 1
        return pin

    def unpin(self, pin: int) -> None:
        """Let a pinned prefix be evicted again; one that is not pinned any more is left alone."""
        node = self._pins.pop(pin, None)
        if node is not None:
            self.tree.unlock(node)
            self._pinned[node] -= 1
            if not self._pinned[node]:
                del self._pinned[node]

    def check_integrity(self, running: list[Sequence]) -> None:
        """Raise AssertionError unless every slot is owned once. For tests."""
        self.tree.check_integrity()
        owned = sum(e.size for sequence in running for e in sequence.kv.own)
        owned += self.tiers.loads.num_slots if self.tiers is not None else 0
        assert self.num_in_use == owned, f"{self.num_in_use} slots in use, {owned} owned"
        if self.states is not None:
            held = [sequence.kv.state for sequence in running]
            self.states.check_integrity([slot for slot in held if slot is not None])
