"""Scheduler: which sequences run in the next step, and how many tokens of each."""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Container
from typing import NamedTuple

from graftlm.core.config import EngineConfig
from graftlm.core.errors import EngineError, GraftError, RequestTooLong
from graftlm.core.execution.step_plan import ScheduledRow, StepPlan
from graftlm.core.kv.prefix_cache import GROWTH, PrefixCache
from graftlm.core.kv.radix import Node, Peek
from graftlm.core.metrics import Counters
from graftlm.core.scheduling.checkpoints import Checkpoints
from graftlm.core.scheduling.step_retry import StepRetry
from graftlm.core.scheduling.waiting_order import Leaders, WaitingOrder
from graftlm.core.sequence import Sequence

HEADROOM = 32  # tokens of each running sequence that a newcomer must leave room for
AHEAD = 16  # tokens that a row may decode before it is scheduled again
SPARE = 16  # the end of a prompt may exceed the step's token budget by 1/16 of `step_tokens`


class Failure(NamedTuple):
    """A sequence that can never run, and why."""

    sequence: Sequence
    error: GraftError


class Scheduler:
    """Continuous batching over one prefix cache.

    Rows that decode come first, then prefills already running, then waiting sequences (waiting_order.py). Prompts share
    the step's token budget, which the last of them may exceed a little if it is then done: what it left over would
    make a step of its own. The budget is smaller in a step that decodes a streamed answer, because its reader waits
    for the whole step. A waiting sequence whose next tokens a running prefill is about to compute lets it go ahead and
    joins once they are published. When slots run out, the youngest running sequence is retracted: what it computed
    stays in the tree as long as there is room, and it waits again with all its tokens.

    step_tokens   prompt tokens computed in one step, beside one token of each row that decodes
    mixed_tokens  the same in a step that decodes a streamed answer
    clock         seconds, in which requests age and have deadlines
    """

    def __init__(
        self,
        config: EngineConfig,
        cache: PrefixCache,
        step_tokens: int,
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.cache = cache
        self.step_tokens = step_tokens
        self.mixed_tokens = min(config.max_mixed_tokens, step_tokens)
        self.counters = counters
        self.clock = clock
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.failures: list[Failure] = []
        self.retry = StepRetry()
        self.order = WaitingOrder(config.schedule, cache, step_tokens, config.max_batch, config.seed)
        self.checkpoints = Checkpoints(cache) if cache.states is not None else None

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def add(self, sequences: list[Sequence]) -> None:
        """Queue sequences, each behind those that arrived no later."""
        for sequence in sequences:
            self._wait(sequence)

    def hold(self, sequence: Sequence) -> None:
        """Take a sequence out until it is resumed; what it computed stays in the cache."""
        self.remove(sequence, publish=True)
        sequence.progress.status = "held"

    def resume(self, sequence: Sequence, num_reused: int) -> None:
        """Let a held sequence wait again. num_reused: tokens that others found in the cache for it meanwhile"""
        if sequence.progress.num_cached is None:
            self._count_prompt(sequence, num_reused)
        self._wait(sequence)

    def remove(self, sequence: Sequence, *, publish: bool) -> None:
        """Take a sequence out, wherever it is, and give its slots back."""
        if sequence.progress.status == "running":
            self._stop(sequence, publish=publish)
        elif sequence.progress.status == "waiting":
            self.waiting.remove(sequence)
            if self.cache.tiers is not None:
                self.cache.tiers.left(sequence)
        sequence.progress.status = "finished"
        self.retry.forget(sequence)

    def schedule(self) -> list[ScheduledRow]:
        """Choose the rows of the next step; may be empty. `failures` holds what cannot run at all.

        While sequences of a failed step run again in parts, the rows are of one part.
        """
        rows = self._rows(self.retry.part())
        # A part may have to be looked at once more, to get the slots that others hold, or to be given up
        for remedy in (None, self.retract_all, self.retry.clear):
            if rows or not self.retry.active:
                break
            if remedy is not None:
                remedy()
            rows = self._rows(self.retry.part())
        return rows

    def retract_all(self) -> None:
        """Retract all running sequences. Tokens in flight are dropped, since their steps are given up."""
        if self.cache.states is not None:
            self.cache.states.reject()
        for sequence in list(self.running):
            # a lane's own cache may be anywhere after a failure; slots hold what earlier steps computed. A state that
            # the failed step was writing is not kept, because it is counted as MOVING
            self._stop(sequence, publish=self.cache.lane is None)
            self._wait(sequence)
        for sequence in self.waiting:
            sequence.progress.num_in_flight = 0

    def _rows(self, part: Container[Sequence] | None) -> list[ScheduledRow]:
        """The rows of a step of the sequences in `part`; None stands for all."""
        running = [s for s in sorted(self.running, key=_decode_first) if part is None or s in part]
        budget = self.mixed_tokens if any(_streams(s) for s in running) else self.step_tokens
        rows: list[ScheduledRow] = []
        num_retracted = self.counters.retracted
        if self.checkpoints is not None:
            self.checkpoints.look(self.waiting)
        if self.cache.tiers is not None:
            self.cache.tiers.poll()
        for sequence in running:
            if sequence.progress.status != "running":
                continue  # retracted for an older one
            if self.cache.is_ahead(sequence):
                self._retract(sequence)  # it starts again from its last checkpoint
                continue
            if row := self._next_row(sequence, budget):
                try:
                    if not self._make_room(sequence, sequence.progress.num_computed + row.num_new):
                        continue
                except BaseException as error:
                    self._drop(sequence, error)
                    continue
                rows.append(row)
                budget -= row.num_new if row.num_new > 1 else 0
        rows = [row for row in rows if row.sequence.progress.status == "running"]
        full = budget <= 0 or len(self.running) >= self.config.max_batch or self.counters.retracted > num_retracted
        if self.waiting and not full:
            self._admit(rows, budget, part)
        return rows

    # -- what has become of the rows ---------------------------------------------------------------------------

    def launched(self, plan: StepPlan, num_steps: int = 1) -> None:
        """Count a step's tokens as computed and publish its prompts: steps that read them are launched later.

        num_steps  of one token for each row, of which this is the first
        """
        for row in plan.rows:
            sequence, past, kv_len = row.sequence, row.past, row.kv_len - len(row.drafts) + num_steps - 1
            num_prompt, progress = sequence.num_prompt_tokens, sequence.progress
            progress.num_computed = kv_len
            if progress.num_cached is None:
                self._count_prompt(sequence, progress.num_reused)
            self.cache.advance(sequence, kv_len)
            if past < num_prompt:
                self.counters.computed_tokens += min(kv_len, num_prompt) - past
                self.cache.publish(sequence)
                if self.checkpoints is not None and self.checkpoints.due(sequence, kv_len):
                    self.cache.checkpoint(sequence)

    def _count_prompt(self, sequence: Sequence, num_reused: int) -> None:
        # tokens that a grammar forced after the prompt may be cached too; they are not part of it
        num_cached = sequence.progress.num_cached = min(num_reused, sequence.num_prompt_tokens)
        self.counters.prompt_tokens += sequence.num_prompt_tokens
        for span in sequence.prompt.spans:
            self.counters.images += span.values.first == 0
            self.counters.image_tokens += span.stop - span.start
        self.counters.cached_tokens += num_cached

    # -- who runs ----------------------------------------------------------------------------------------------

    def _admit(self, rows: list[ScheduledRow], budget: int, part: Container[Sequence] | None) -> None:
        leaders = Leaders(self.cache, self.running if part is None else [s for s in self.running if s in part])
        headroom = sum(min(s.remaining, HEADROOM) for s in self.running)
        started = False
        for sequence, peek in self.order.of(self.waiting, self.running, self.clock(), part):
            if budget <= 0 or len(self.running) >= self.config.max_batch:
                return
            if sequence.prompt.modules and not self.cache.modules.ready(sequence):
                continue
            if started or self.cache.tiers is not None:
                peek = self.cache.peek(sequence)  # a start may have split, and a load evicted, nodes of the first look
            if self.checkpoints is not None:
                if self.checkpoints.waits(sequence, peek.length):
                    continue
            elif leaders.precede(sequence, peek):
                continue
            tiers = self.cache.tiers if not sequence.prompt.modules else None
            if tiers is not None and tiers.arriving(sequence):
                headroom += tiers.missing(sequence) + min(GROWTH, max(sequence.remaining, 0))
                continue
            if not self._fits(sequence, peek, headroom):
                tiers = self.cache.tiers
                if not self.running and not (tiers is not None and (tiers.busy or tiers.let_go())):
                    self._fail(sequence)
                    continue
                return  # what runs, or is loaded, will make room; nobody overtakes meanwhile
            try:
                if tiers is not None:
                    if tiers.awaits(sequence, peek):
                        headroom += tiers.missing(sequence) + min(GROWTH, max(sequence.remaining, 0))
                        continue
                    peek = self.cache.peek(sequence)
                self._start(sequence, peek)
            except BaseException as error:
                self._drop(sequence, error)
                continue
            started = True
            headroom += min(sequence.remaining, HEADROOM)
            leaders.add(sequence)
            if row := self._next_row(sequence, budget):
                rows.append(row)
                budget -= row.num_new

    def _next_row(self, sequence: Sequence, budget: int) -> ScheduledRow | None:
        progress = sequence.progress
        if progress.num_in_flight and sequence.exhausted:
            return None
        past = progress.num_computed
        num_new = pending = len(sequence.tokens) + progress.num_in_flight - past
        if not sequence.ready:
            num_new -= 1
        if num_new > 1:
            if budget <= 0:
                return None
            if self.checkpoints is not None:
                num_new = self.checkpoints.clip(sequence, past, num_new)
            if num_new > budget + self.step_tokens // SPARE:
                num_new = budget
        if num_new <= 0:
            return None
        if sequence.prompt.spans:
            num_new = _whole_spans(sequence, past, num_new)
        if num_new == pending == 1 and not sequence.scoring:
            return ScheduledRow(sequence, 1, 1)
        return ScheduledRow(sequence, num_new, max(0, past + num_new - max(past, sequence.first_logit)))

    def _make_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Hold slots for the first `num_tokens` tokens, retracting the youngest if need be; for some more if it can."""
        capacity, remaining = sequence.kv.capacity, max(sequence.remaining, 0)
        if capacity >= num_tokens + min(AHEAD, remaining):
            return True
        generous = num_tokens + min(GROWTH, remaining)
        if self.cache.pool.num_free >= generous - capacity and self.cache.reserve(sequence, generous):
            return True
        if capacity >= num_tokens:
            return True
        while not self.cache.reserve(sequence, num_tokens):
            victim = max(self.running, key=lambda s: (s.arrived_s, s.request.id, s.index))
            if victim is sequence and len(self.running) == 1:
                self._stop(sequence, publish=False)
                self._wait(sequence)
                self._fail(sequence)
                return False
            self._retract(victim)
            if victim is sequence:
                return False
        return True

    def _retract(self, sequence: Sequence) -> None:
        self._stop(sequence, publish=True)
        self._wait(sequence)
        self.counters.retracted += 1

    def _stop(self, sequence: Sequence, *, publish: bool) -> None:
        """Take a running sequence out and give its slots back."""
        self.running.remove(sequence)
        self.cache.release(sequence, publish=publish)
        sequence.progress.num_computed = 0

    def _wait(self, sequence: Sequence) -> None:
        sequence.progress.status = "waiting"
        insort(self.waiting, sequence, key=_arrival)  # `waiting` is in order of arrival, always

    def _start(self, sequence: Sequence, peek: Peek) -> None:
        if sequence.progress.num_cached is None:
            sequence.progress.miss = self.cache.miss(sequence, peek)
        if sequence.progress.started_s is None:
            sequence.progress.started_s = time.monotonic()
        sequence.progress.num_reused = sequence.progress.num_computed = self.cache.start(sequence)
        growth = min(GROWTH, max(sequence.remaining, 0))
        if not self.cache.reserve(sequence, sequence.num_tokens + growth):
            self.cache.reserve(sequence, sequence.num_tokens)
        self.waiting.remove(sequence)
        sequence.progress.status = "running"
        self.running.append(sequence)
        if self.checkpoints is not None:
            self.checkpoints.start(sequence, self.waiting)

    def _fits(self, sequence: Sequence, peek: Peek, headroom: int) -> bool:
        needed = sequence.num_tokens - peek.length
        wanted = needed + min(GROWTH, max(sequence.remaining, 0)) + headroom
        available = self.cache.num_available - _unlocked(peek)
        if not self.cache.has_state_room:
            return False
        return available >= (wanted if self.running else needed)

    def _fail(self, sequence: Sequence) -> None:
        limit = self.cache.num_available
        self.remove(sequence, publish=False)
        if not self.cache.has_state_room:
            message = "every state is that of a pinned prefix; unpin one or raise CacheConfig.states"
            self.failures.append(Failure(sequence, EngineError(message)))
            return
        message = (
            f"the request needs {sequence.num_tokens:,} KV slots, the pool has {limit:,} that are not pinned; "
            "shorten it, unpin a prefix or raise CacheConfig.max_tokens"
        )
        self.failures.append(Failure(sequence, RequestTooLong(message, length=sequence.num_tokens, limit=limit)))

    def _drop(self, sequence: Sequence, error: BaseException) -> None:
        """End a sequence for which taking slots raised."""
        self.cache.release(sequence, publish=False)
        self.remove(sequence, publish=False)
        failure = EngineError(f"no KV slots could be taken: {type(error).__name__}: {error}")
        failure.__cause__ = error
        self.failures.append(Failure(sequence, failure))


def sent(sequence: Sequence, place: int) -> None:
    """Count a token that a launched step samples on the device. place: among the tokens of the step"""
    sequence.progress.num_in_flight += 1
    sequence.progress.pending_index = place


def received(sequence: Sequence) -> None:
    """Note that a token in flight has arrived."""
    sequence.progress.num_in_flight -= 1


def rewind(sequence: Sequence, num_computed: int) -> None:
    """Keep the KV of the first `num_computed` tokens only; later steps write over the rest."""
    sequence.progress.num_computed = num_computed


def _whole_spans(sequence: Sequence, past: int, num_new: int) -> int:
    """Return the tokens of a step that ends in no span whose tokens see each other; it may exceed the budget."""
    layout = sequence.prompt.layout
    if layout is None or not layout.both_ways:
        return num_new
    for span in sequence.prompt.spans:
        if span.start < past + num_new < span.stop:
            return span.start - past if span.start > past else span.stop - past
    return num_new


def _arrival(sequence: Sequence) -> float:
    return sequence.arrived_s


def _decode_first(sequence: Sequence) -> bool:
    return sequence.num_pending > 1 and sequence.num_generated == 0


def _streams(sequence: Sequence) -> bool:
    """Whether somebody waits for the next token of a sequence."""
    return sequence.request.stream and not _decode_first(sequence) and not sequence.exhausted


def _unlocked(peek: Peek) -> int:
    """Tokens of the matched path that count as evictable now and will not once they are locked."""
    node: Node | None = peek.node
    total = peek.offset if peek.inside is not None and not peek.inside.locks else 0
    while node is not None and not node.locks:
        total += node.num_tokens
        node = node.parent
    return total
