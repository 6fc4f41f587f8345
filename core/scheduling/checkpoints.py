"""Checkpoints: at which tokens prefills stop to keep a state, for models that have layers with one.

A state is large and cannot be cut back to fewer tokens, so one is kept exactly where another sequence will go on: where
prompts part, and at the end of a prompt. The next turn of a chat parts a few tokens before that end if its template
writes earlier turns in another way (without thoughts, say). Such tails of prompts are learned from the first turn that
parts so; prompts that end alike then keep their state before the tail.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from graftlm.core.kv.prefix_cache import PrefixCache
from graftlm.core.kv.radix import Peek
from graftlm.core.sequence import Sequence

WINDOW = 256  # waiting sequences that a prefill is compared with
GAIN = 16  # tokens by which two checkpoints of a prefill lie apart at least, and that a sequence waits for at least
LONG = 64  # tokens of a prompt from which on the state before its last token is kept, for the same prompt again
INTERVAL = 8192  # tokens after which a long prompt keeps a state that nothing has asked for yet
TAIL = 16  # tokens of a tail of prompts, at most
TAILS = 16  # tails that are remembered
PROMPTS = 4096  # prompts whose ends are remembered, to find a tail


@dataclass(eq=False)
class Leader:
    """A running prefill.

    base       tokens that it found in the cache
    positions  its checkpoints, ascending: numbers of tokens
    shared     by the number of each waiting sequence it was compared with: the tokens that both begin with
    """

    sequence: Sequence
    base: int
    positions: list[int] = field(default_factory=list)
    shared: dict[int, int] = field(default_factory=dict)


class Checkpoints:
    """Plans the checkpoints of running prefills, and says which waiting sequences wait for one."""

    def __init__(self, cache: PrefixCache) -> None:
        self.cache = cache
        self._leaders: dict[int, Leader] = {}
        self._ends: OrderedDict[tuple[int, bytes], None] = OrderedDict()  # number of tokens, and the last ones
        self._tails: OrderedDict[bytes, None] = OrderedDict()

    def start(self, sequence: Sequence, waiting: Seq[Sequence]) -> None:
        """Plan the checkpoints of a sequence that has just started."""
        if not self.cache.enabled:
            return
        leader = Leader(sequence, sequence.progress.num_computed)
        ids, end = sequence.ids, sequence.first_logit
        if leader.base >= end and sequence.sampling.n == 1:
            return  # its last token alone is left: the state before it is cached
        peek = self.cache.tree.peek(ids[:end], sequence.request.namespace)
        self._add(leader, peek.length)
        if peek.length - leader.base >= GAIN:
            self._learn(ids, peek)
        prompt = sequence.prompt_ids
        tail = self._tail(prompt)
        _remember(self._ends, _end(prompt), PROMPTS)
        for position in range(leader.base + INTERVAL, end - INTERVAL, INTERVAL):
            self._add(leader, position)
        if tail is not None or sequence.num_prompt_tokens - leader.base >= LONG:
            self._add(leader, min(sequence.num_prompt_tokens - max(tail or 0, 1), end))
        if sequence.sampling.n > 1:
            self._add(leader, sequence.num_prompt_tokens, gap=1)
        self._leaders[sequence.number] = leader
        self._compare(leader, waiting)

    def look(self, waiting: Seq[Sequence]) -> None:
        """Compare running prefills with the sequences that have arrived since, before the rows of a step are sized."""
        for number, leader in list(self._leaders.items()):
            sequence = leader.sequence
            done = not leader.positions or sequence.progress.num_computed >= leader.positions[-1]
            if sequence.progress.status != "running" or (done and sequence.num_pending <= 1):
                del self._leaders[number]
            else:
                self._compare(leader, waiting)

    def clip(self, sequence: Sequence, past: int, num_new: int) -> int:
        """Return how many of `num_new` tokens after `past` to compute, so that the step ends at the next checkpoint."""
        leader = self._leaders.get(sequence.number)
        if leader is None:
            return num_new
        following = bisect_right(leader.positions, past)
        if following == len(leader.positions):
            return num_new
        return min(num_new, leader.positions[following] - past)

    def due(self, sequence: Sequence, num_computed: int) -> bool:
        """Whether a state is kept after `num_computed` tokens."""
        leader = self._leaders.get(sequence.number)
        return leader is not None and num_computed in leader.positions

    def waits(self, sequence: Sequence, num_cached: int) -> bool:
        """Whether `sequence` waits for a checkpoint of a running prefill, because that saves it enough tokens."""
        wanted = num_cached + min(GAIN, max(1, (sequence.first_logit - num_cached) // 2))
        for leader in self._leaders.values():
            shared = leader.shared.get(sequence.number, 0)
            if shared < wanted or leader.sequence.progress.status != "running":
                continue
            reached = bisect_right(leader.positions, shared)
            position = leader.positions[reached - 1] if reached else 0
            if position >= wanted and leader.sequence.progress.num_computed < position:
                return True
        return False

    def _learn(self, ids: np.ndarray, peek: Peek) -> None:
        """Remember the tail of an earlier prompt that a prompt `ids` has left at `peek`, close to its end."""
        cached = self.cache.tree.continuation(peek, TAIL)
        whole = np.concatenate([ids[max(0, peek.length - TAIL) : peek.length], cached])
        first = peek.length - (len(whole) - len(cached))
        for length in range(peek.length, first + len(whole) + 1):
            if (length, whole[: length - first][-TAIL:].tobytes()) in self._ends:
                _remember(self._tails, cached[: length - peek.length].tobytes(), TAILS)
                return

    def _tail(self, prompt: np.ndarray) -> int | None:
        """Return the tokens of the longest tail that `prompt` ends with; None if it ends with none."""
        end = prompt[-TAIL:].tobytes()
        found = [tail for tail in self._tails if end.endswith(tail)]
        for tail in found:
            self._tails.move_to_end(tail)
        return max(map(len, found)) // prompt.itemsize if found else None

    def _compare(self, leader: Leader, waiting: Seq[Sequence]) -> None:
        sequence = leader.sequence
        unseen = [one for one in waiting[:WINDOW] if one.number not in leader.shared and one is not sequence]
        if not unseen:
            return
        ids, past = sequence.ids, sequence.progress.num_computed
        for other in unseen:
            shared = 0
            if other.request.namespace == sequence.request.namespace:
                shared = min(_common(ids, other.prompt_ids), other.first_logit, len(ids) - 1)
            leader.shared[other.number] = shared
            if shared > past:
                self._add(leader, shared)

    def _add(self, leader: Leader, position: int, gap: int = GAIN) -> None:
        """Keep a state at `position`, unless that is less than `gap` tokens after another one."""
        position -= position % self.cache.tree.page_size
        before = bisect_right(leader.positions, position)
        last = leader.positions[before - 1] if before else leader.base
        if position - last >= min(gap, GAIN):
            insort(leader.positions, position)


def _end(prompt: np.ndarray) -> tuple[int, bytes]:
    """Return what `Checkpoints` remembers of a prompt: its number of tokens, and the last ones."""
    return len(prompt), prompt[-TAIL:].tobytes()


def _remember(entries: OrderedDict[Any, None], key: object, limit: int) -> None:
    """Add `key` as the newest entry; the oldest one goes if there are more than `limit`."""
    entries[key] = None
    entries.move_to_end(key)
    if len(entries) > limit:
        entries.popitem(last=False)


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Return the length of the longest common prefix of two id arrays."""
    length = min(len(a), len(b))
    if length == 0 or a[0] != b[0]:  # most pairs of waiting prompts
        return 0
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if different.size else length
