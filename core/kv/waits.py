"""KV that waits: cached prefixes whose callers are busy elsewhere, for example in a tool, and when these return.

A hold takes no memory and changes no answer: it changes the order of eviction. Among held prefixes the one whose caller
returns last goes first. A prefix that waits long goes before all others where host memory is behind the pool, from
which it is read back in milliseconds; without host memory it goes after all others, because it would be computed again.
Source: API Serve (InferCept), arXiv 2402.01869.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from graftlm.core.kv.radix import Node, RadixTree, path_of

MOVES_AFTER_S = 0.25
"""Seconds of an expected wait from which host memory is cheaper: 2,000 tokens of an 8B model take 10 ms both ways."""

DEFAULT_S = 1.0
"""Seconds of the expected wait for a tool whose pauses are not known yet."""

LATE = 4.0
"""A hold ends after LATE times the expected wait, and a second: the caller may never return."""

NEWEST = 0.5
"""Weight of the newest pause in the moving average of a label."""

RECENT = 1024
"""Finished requests whose prefixes can be held by the request's number."""


@dataclass(eq=False)
class Hold:
    """A prefix whose caller is expected to return.

    ids       int32 [num_tokens], the prefix;  least: tokens of it with which a prompt must begin to be the return
    returns_s, ends_s  expected end of the wait, and the end of the hold without a return, on the clock of `Waits`
    moves     whether it is evicted before others, because host memory has it then
    nodes     of the tree, on the path of the prefix
    """

    ids: np.ndarray
    namespace: str
    least: int
    label: str
    began_s: float
    returns_s: float
    ends_s: float
    moves: bool
    nodes: list[Node] = field(default_factory=list)


class Waits:
    """The holds of one prefix cache, and the mean pause of each label.

    moves  whether host memory is behind the pool
    """

    def __init__(self, tree: RadixTree, moves: Callable[[], bool], clock: Callable[[], float] = time.monotonic) -> None:
        self.mean_s: dict[str, float] = {}
        self._tree = tree
        self._moves = moves
        self._clock = clock
        self._holds: dict[int, Hold] = {}
        self._recent: dict[int, tuple[Node, int]] = {}

    def __len__(self) -> int:
        return len(self._holds)

    def finished(self, request_id: int, node: Node, num_prompt: int) -> None:
        """Note the node at which the published tokens of a request end."""
        self._recent[request_id] = node, num_prompt
        if len(self._recent) > RECENT:
            del self._recent[next(iter(self._recent))]

    def hold(self, number: int, prefix: int | np.ndarray, namespace: str, seconds: float | None, label: str) -> None:
        """Expect a caller to return with a cached prefix: of a finished request, by its number, or of token ids."""
        if isinstance(prefix, int):
            self.hold_request(number, prefix, seconds, label)
        else:
            self.hold_ids(number, prefix, namespace, seconds, label)

    def hold_request(self, number: int, request_id: int, seconds: float | None, label: str) -> None:
        """Hold what a finished request has published, if the tree still has it."""
        node, num_prompt = self._recent.get(request_id, (None, 0))
        if node is not None and node.parent is not None:
            # a chat template may write the answer in another form afterwards
            self._hold(number, node, max(num_prompt - num_prompt // 8, 1), seconds, label)

    def hold_ids(self, number: int, ids: np.ndarray, namespace: str, seconds: float | None, label: str) -> None:
        """Hold the cached prefix of token ids; nothing if none of them is cached."""
        peek = self._tree.peek(ids, namespace)
        if peek.length:
            self._hold(number, peek.inside or peek.node, peek.length, seconds, label)

    def _hold(self, number: int, node: Node, least: int, seconds: float | None, label: str) -> None:
        self.expire()
        now, wait_s = self._clock(), self.mean_s.get(label, DEFAULT_S) if seconds is None else seconds
        moves = self._moves() and wait_s >= MOVES_AFTER_S
        ids = path_of(node)[0]
        hold = Hold(ids, node.namespace, least, label, now, now + wait_s, now + LATE * wait_s + 1.0, moves)
        step = node
        while step.parent is not None:
            if step.hold is None or step.hold.returns_s > hold.returns_s:
                step.hold = hold
                hold.nodes.append(step)
                self._reorder(step)
            step = step.parent
        self._holds[number] = hold

    def _reorder(self, node: Node) -> None:
        """Queue a node again, whose place in the order of eviction has changed."""
        node.queued = False  # the old entry is skipped, for its place is another
        self._tree.offer(node)

    def release(self, number: int) -> None:
        """End a hold: its prefix is evicted as any other. One that has ended is left alone."""
        hold = self._holds.pop(number, None)
        if hold is not None:
            for node in hold.nodes:
                if node.hold is hold:
                    node.hold = None
                    self._reorder(node)

    def started(self, ids: np.ndarray, namespace: str) -> None:
        """End the holds of prefixes with which the prompt of a request begins, and learn their pauses."""
        now = self._clock()
        for number, hold in list(self._holds.items()):
            least = hold.least
            if hold.namespace == namespace and len(ids) >= least and np.array_equal(ids[:least], hold.ids[:least]):
                pause_s, mean_s = now - hold.began_s, self.mean_s.get(hold.label)
                self.mean_s[hold.label] = pause_s if mean_s is None else mean_s + NEWEST * (pause_s - mean_s)
                self.release(number)
        self.expire()

    def expire(self) -> None:
        """End the holds whose callers did not return in time."""
        now = self._clock()
        for number in [number for number, hold in self._holds.items() if hold.ends_s < now]:
            self.release(number)
