"""In which order waiting sequences may start, and which of them wait for a running prefill of the same prefix."""

from __future__ import annotations

import heapq
import random
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Sequence as Seq
from typing import NamedTuple

import numpy as np

from graftlm.core.config import SchedulerConfig
from graftlm.core.kv.prefix_cache import PrefixCache
from graftlm.core.kv.radix import Node, Peek
from graftlm.core.sequence import Sequence

WINDOW = 256  # waiting sequences that are considered in one step
TOGETHER = 1 / 16  # of max_age_s: sequences that arrive within it count as having arrived together
SAME = 16  # tokens: prefixes that differ by less are as good as each other, for texts may begin alike by chance
LONG = 1 / 2  # of the longest answer: from here on an answer is long
WORTH_WAITING = 16  # tokens a sibling must share with a running prefill to wait for it


class Candidate(NamedTuple):
    """A waiting sequence, and what the cache holds of it."""

    sequence: Sequence
    peek: Peek


class WaitingOrder:
    """Orders the oldest waiting sequences by the policy of the configuration.

    Under "lpm" those older than `max_age_s` come first, in order of arrival. The others follow by cached prefix plus
    age, of which a full age is worth a step's tokens. Among those that arrived together and have about as much cached,
    long answers start first, since a long one that starts last runs on alone; then those with the fewest tokens to
    compute, so that most of them wait least.

    Before all of this comes fairness: of several callers, and of several calls with many sequences, those that hold
    less than a quarter of the batch start first (`Request.owner`), and of theirs those with the lowest `priority`.

    step_tokens  prompt tokens computed in one step
    max_batch    the most sequences that run at once
    """

    def __init__(
        self, config: SchedulerConfig, cache: PrefixCache, step_tokens: int, max_batch: int, seed: int | None
    ) -> None:
        self.config = config
        self.cache = cache
        self.max_batch = max_batch
        self._rate = step_tokens / config.max_age_s if config.max_age_s else 0.0
        self._random = random.Random(seed)

    def of(
        self, waiting: Seq[Sequence], running: Iterable[Sequence], now: float, part: Container[Sequence] | None
    ) -> list[Candidate]:
        """Those to look at, in the order in which they may start.

        waiting  in order of arrival
        part     only sequences of it are looked at; None stands for all
        """
        window = list(waiting[:WINDOW]) if part is None else [s for s in waiting if s in part]
        if part is None and any(s.request.priority for s in waiting):
            shares = self._shares(waiting, running)
            ranks = {s: (shares.get(s, ()), s.request.priority) for s in waiting}
            window = heapq.nsmallest(WINDOW, waiting, key=ranks.__getitem__)
            return sorted(self._ordered(window, running, now), key=lambda one: ranks[one.sequence])
        if part is None and (len(waiting) > WINDOW or len({s.request.owner for s in window}) > 1):
            shares = self._shares(waiting, running)
            if shares:
                window = heapq.nsmallest(WINDOW, waiting, key=shares.__getitem__)
                return sorted(self._ordered(window, running, now), key=lambda one: shares[one.sequence])
        return self._ordered(window, running, now)

    def _shares(self, waiting: Seq[Sequence], running: Iterable[Sequence]) -> dict[Sequence, tuple[int, int]]:
        """Return the rank of each waiting sequence by the share of the batch that its caller and its call have.

        A caller, or a call, that holds a quarter of the batch comes after those that hold less. {} for one call alone.
        """
        owners = {s.request.owner for s in waiting}
        if len(owners) == 1:
            return {}
        quarter, several = max(1, self.max_batch // 4), len({caller for caller, _ in owners}) > 1
        held: Counter[str | tuple[str, str]] = Counter()
        for sequence in running:
            held[sequence.request.owner] += 1
            held[sequence.request.owner[0]] += 1
        ranks = {}
        for sequence in waiting:
            owner = sequence.request.owner
            ranks[sequence] = held[owner[0]] // quarter if several else 0, held[owner] // quarter
            held[owner] += 1
            held[owner[0]] += 1
        return ranks

    def _ordered(self, window: Seq[Sequence], running: Iterable[Sequence], now: float) -> list[Candidate]:
        """Order a window by the policy."""
        if self.config.policy == "random":
            window = self._random.sample(window, len(window))
        if self.config.policy != "lpm" or not self.cache.enabled:
            return self._peeked(window[: self.max_batch])
        aged = [s for s in window if now - s.arrived_s > self.config.max_age_s]
        young = self._peeked([s for s in window if now - s.arrived_s <= self.config.max_age_s])
        long = LONG * max((s.remaining for s in (*running, *window)), default=0)
        young.sort(key=lambda one: self._rank(one, now, long))
        return self._peeked(aged) + young

    def _peeked(self, sequences: Iterable[Sequence]) -> list[Candidate]:
        return [Candidate(sequence, self.cache.peek(sequence)) for sequence in sequences]

    def _rank(self, one: Candidate, now: float, long: float) -> tuple[float, int, float, int]:
        """Sorts first what may start first. long: answers are compared from this length on"""
        sequence, peek = one
        together = TOGETHER * self.config.max_age_s
        arrived_s = sequence.arrived_s // together * together if together else sequence.arrived_s
        cached = peek.length - peek.length % SAME
        claim = cached + self._rate * (now - arrived_s)
        place = id(peek.node) if cached else 0
        return -claim, place, -max(sequence.remaining, long), sequence.num_tokens - peek.length


class Leaders:
    """The running prefills that compute what waiting sequences begin with.

    Kept are the next tokens of each, by the place in the tree where its KV will hang.
    """

    def __init__(self, cache: PrefixCache, running: Iterable[Sequence]) -> None:
        self._cache, self._page_size = cache, cache.tree.page_size
        self._starts: defaultdict[tuple[int, bytes], set[bytes]] = defaultdict(set)
        if cache.enabled:
            for sequence in running:
                if sequence.num_pending > 1:
                    self.add(sequence)

    def add(self, sequence: Sequence) -> None:
        """Let others wait for a sequence that has started."""
        kv = sequence.kv
        rest = sequence.ids[kv.num_shared :]
        self._starts[self._place(kv.node, rest)].add(rest[:WORTH_WAITING].tobytes())

    def precede(self, sequence: Sequence, peek: Peek) -> bool:
        """Whether a running prefill computes the next tokens of a waiting sequence, which is cached up to `peek`.

        A prefill that has begun a picture goes on behind its first ids, where the wanted ones make up for their number.
        """
        if self._starts and sequence.prompt.spans:
            peek = self._cache.peek(sequence, cut=False)
        if not self._starts or peek.inside is not None:
            return False
        rest = sequence.ids[peek.length : sequence.first_logit]
        starts = self._starts.get(self._place(peek.node, rest), set())
        wanted = rest[: min(WORTH_WAITING, max(1, len(rest) // 2))].tobytes()
        return bool(wanted) and (wanted in starts or any(start.startswith(wanted) for start in starts))

    def _place(self, node: Node | None, rest: np.ndarray) -> tuple[int, bytes]:
        return id(node), rest[: self._page_size].tobytes()
