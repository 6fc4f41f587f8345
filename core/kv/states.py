"""StateSlots: who owns which slot of the pool of states, and how many tokens each state has consumed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable

import numpy as np
from numpy.typing import NDArray

from graftlm.core.errors import EngineError
from graftlm.core.kv.radix import Node
from graftlm.kernels.wire_plan import RESERVED, ZERO

MOVING = -1
"""The count of a state that a launched step writes, until the step is known to have been launched whole."""


class StateSlots:
    """Slots of the pool of states: free + of nodes + of sequences == num_slots.

    A checkpoint is the state of a radix node, after exactly the node's last token. Checkpoints are evicted in an order
    of their own, the least recently used first; the KV of their nodes stays.

    pinned    nodes whose state is never evicted
    evicting  called with a node before its state is evicted: the slot still holds it
    """

    def __init__(self, num_slots: int, pinned: Container[Node]) -> None:
        self.num_slots = num_slots
        self.num_evicted = 0
        self.evicting: Callable[[Node], None] = lambda node: None
        self._pinned = pinned
        self._free = list(range(RESERVED + num_slots - 1, RESERVED - 1, -1))
        self._nodes: OrderedDict[int, Node] = OrderedDict()  # by slot, least recently used first
        self._consumed: dict[int, int] = {}
        self._copies: dict[int, int] = {}
        self._sent: set[int] = set()
        self._unchecked: list[Node] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Checkpoints."""
        return len(self._nodes)

    @property
    def num_in_use(self) -> int:
        """States of sequences."""
        return self.num_slots - len(self._free) - len(self._nodes)

    @property
    def available(self) -> bool:
        """Whether a slot is free or can be made free."""
        return bool(self._free) or any(node not in self._pinned for node in self._nodes.values())

    @property
    def copies_wait(self) -> bool:
        """Whether copies wait for the next step: until it is launched their sources must keep what they hold."""
        return bool(self._copies)

    def holds(self, node: Node) -> bool:
        """Whether the slot of the state of `node` holds it once all launched steps have run."""
        slot = node.state
        return slot is not None and slot not in self._copies and self._consumed[slot] == node.depth

    def consumed(self, slot: int) -> int:
        """Return the tokens that the state in `slot` has consumed; MOVING while that is not known."""
        return self._consumed[slot]

    def count(self, slot: int, num_tokens: int) -> None:
        """Note how many tokens a state has consumed once the launched steps have run."""
        self._consumed[slot] = num_tokens

    def take(self) -> int | None:
        """Take a slot, evicting the least recently used checkpoint if need be; None if all are in use or pinned."""
        if self._free:
            return self._free.pop()
        for slot, node in self._nodes.items():
            if node not in self._pinned:
                self.evicting(node)
                node.state = None
                del self._nodes[slot]
                self.num_evicted += 1
                return slot
        return None

    def give(self, slot: int) -> None:
        """Free a slot of a sequence."""
        self._free.append(slot)

    def copy(self, slot: int, source: int | None) -> None:
        """Have `slot` hold the state in `source` before the next step; None: the state before any token."""
        origin = ZERO if source is None else source
        if origin != slot:
            # all copies read before any writes: a source that is itself to be written stands for its own source
            self._copies[slot] = self._copies.get(origin, origin)
            self._consumed[slot] = 0 if source is None else self._consumed[source]

    def attach(self, node: Node, slot: int) -> None:
        """Make the state in `slot` the checkpoint of `node`, which owns it from now on."""
        node.state = slot
        self._nodes[slot] = node
        self._unchecked.append(node)

    def touch(self, node: Node) -> None:
        """Count the checkpoint of `node` as used."""
        if node.state is not None:
            self._nodes.move_to_end(node.state)

    def forget(self, node: Node) -> None:
        """Free the checkpoint of a node that ends, or that ends at another token from now on."""
        if node.state is not None:
            del self._nodes[node.state]
            self._free.append(node.state)
            node.state = None

    def clear(self, keep: Container[Node]) -> None:
        """Free the checkpoints of all nodes but those in `keep`."""
        for node in list(self._nodes.values()):
            if node not in keep:
                self.forget(node)

    def send(self) -> NDArray[np.int64]:
        """Return the copies that the next step begins with, int64 [num_copies, 2], and forget them."""
        copies = np.array(list(self._copies.items()), np.int64).reshape(-1, 2)
        self._sent = set(self._copies)
        self._copies.clear()
        return copies

    def confirm(self) -> None:
        """Note that the step with the copies sent last was launched."""
        self._sent.clear()

    def reject(self) -> None:
        """Distrust the copies sent last, whose step has failed: their checkpoints are dropped."""
        for slot in self._sent:
            self._consumed[slot] = MOVING
            if slot in self._nodes:
                self.forget(self._nodes[slot])
        self._sent.clear()

    def check_new(self) -> None:
        """Raise EngineError if a checkpoint attached since the last check is not of its node's last token."""
        self._check(node for node in self._unchecked if node.state is not None)
        self._unchecked.clear()

    def check_integrity(self, sequence_slots: list[int]) -> None:
        """Raise unless every slot is owned once, and every checkpoint is of its node's last token. For tests."""
        self._check(self._nodes.values())
        owned = [*self._free, *self._nodes, *sequence_slots]
        assert sorted(owned) == list(range(RESERVED, RESERVED + self.num_slots)), f"slots {sorted(owned)} are owned"
        assert all(node.state == slot for slot, node in self._nodes.items())

    def _check(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            assert node.state is not None
            consumed = self._consumed[node.state]
            if consumed != node.depth:
                raise EngineError(f"the state after {consumed} tokens was kept at token {node.depth} of a prefix")
