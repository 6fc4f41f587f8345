"""RequestTracker: follows each request from its arrival to the one result that its listener gets."""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from graftlm.core.errors import EngineError, RequestCancelled, RequestTimeout, failure_of
from graftlm.core.request import Completion, Listener, OpenRequest, Request, Submission
from graftlm.core.scheduling.admission import Limits, admit
from graftlm.core.scheduling.choice import Choice
from graftlm.core.scheduling.scheduler import rewind
from graftlm.core.sequence import Sequence, SequenceGroup

if TYPE_CHECKING:
    from graftlm.core.grammar.compile import Grammar
    from graftlm.core.sampling.sampler import Sampled
    from graftlm.core.scheduling.output_writer import OutputWriter
    from graftlm.core.scheduling.scheduler import Scheduler
    from graftlm.core.scheduling.speculation import Drafter


log = logging.getLogger("graftlm.engine")


class RequestTracker:
    """Every request ends here, once: with a completion, or with an error that names its cause.

    What a request's own grammar, matcher, listener or text raises ends that request and no other, be it SystemExit or
    the panic of a library in Rust, which is no Exception.

    wake      called from any thread when a grammar has been compiled
    finished  told of every completion
    drafter   keeps what was written, for guesses; None where nothing is guessed
    """

    def __init__(
        self,
        scheduler: Scheduler,
        writer: OutputWriter,
        limits: Limits,
        drafter: Drafter | None,
        *,
        seed: int | None,
        wake: Callable[[], None],
        finished: Callable[[Request, Completion], None],
    ) -> None:
        self.scheduler = scheduler
        self.writer = writer
        self.counters = scheduler.counters
        self.limits = limits
        self.drafter = drafter
        self.wake = wake
        self.clock = scheduler.clock
        self.finished = finished
        self._cache = scheduler.cache
        self._groups: dict[int, SequenceGroup] = {}
        self._timed: dict[int, SequenceGroup] = {}
        self._unopened: dict[int, Sequence] = {}  # by their groups' ids, which a future may keep for long
        self._compiled: deque[int] = deque()
        self._seeds = random.Random(seed)

    @property
    def open(self) -> list[OpenRequest]:
        """The requests that wait or run. From any thread."""
        now = self.clock()
        return [group.progress(now) for group in list(self._groups.values()) if not group.done]

    # -- they arrive -------------------------------------------------------------------------------------------

    def add(self, submission: Submission) -> None:
        """Queue a request; one that can never run is refused to its listener."""
        try:
            group = SequenceGroup.of(submission)
            (sequence,) = group.sequences
            sequence.bounds = admit(sequence, self.limits, self._seeds)
        except BaseException as error:
            self.counters.failed += 1
            abandon(submission.grammar)
            self._tell_error(submission.listener, failure_of(error))
            return
        self.counters.requests += 1
        self._groups[group.id] = group
        if sequence.bounds.deadline_s is not None:
            self._timed[group.id] = group
        if sequence.grammar is not None:
            self._unopened[group.id] = sequence
            sequence.grammar.add_done_callback(partial(self._note_compiled, group.id))
        self.scheduler.add([sequence])
        if group.request.begun and sequence.grammar is None:
            self._continue(sequence)

    def open_grammars(self) -> None:
        """Append what compiled grammars force at the start, so that it runs with the prompt."""
        while self._compiled:
            sequence = self._unopened.pop(self._compiled.popleft(), None)
            if sequence is None:  # its request has ended
                continue
            if sequence.request.begun:
                self._continue(sequence)
                continue
            try:
                self.writer.open(sequence)
                if sequence.output.finish_reason is not None:
                    self._end_forced(sequence)
                    continue
            except BaseException as error:
                self.fail(sequence, failure_of(error))
                continue
            self._choose_or_finish(sequence)

    def _end_forced(self, sequence: Sequence) -> None:
        """End a request whose whole text its grammar forced: no step will fork its answers, which are all alike."""
        group = sequence.group
        assert group is not None
        siblings = [self.writer.fork(sequence, i) for i in range(1, sequence.sampling.n)]
        group.sequences.extend(siblings)
        self.scheduler.add(siblings)
        for member in list(group.sequences):
            self._emit(member)
            if group.done:
                return  # all have ended, or one failed and the request with it

    def _continue(self, sequence: Sequence) -> None:
        """Continue the answers of a request that another engine began: all n of them are sequences already."""
        group = sequence.group
        assert group is not None
        try:
            self.writer.begin(sequence)
            siblings = [self.writer.fork(sequence, i) for i in range(1, sequence.sampling.n)]
            group.sequences.extend(siblings)
            self.scheduler.add(siblings)
            for member, begun in zip(group.sequences, group.request.begun, strict=True):
                self.writer.replay(member, begun)
                member.counted = len(begun.token_ids), 0  # the engine that has died counted them
        except BaseException as error:
            self.fail(sequence, failure_of(error))
            return
        for member in list(group.sequences):
            self._emit(member)
            if group.done:
                return

    def _note_compiled(self, group_id: int, _: Future[Grammar]) -> None:
        """From any thread."""
        self._compiled.append(group_id)
        self.wake()

    # -- they are answered -------------------------------------------------------------------------------------

    def append(self, sequence: Sequence, samples: int | list[Sampled]) -> None:
        """Append what was sampled: a token, or samples, of which several make as many sequences of one."""
        if isinstance(samples, int):
            self._append(sequence, samples, None)
            return
        group, members = sequence.group, [sequence]
        assert group is not None
        if len(samples) > 1:
            try:
                siblings = [self.writer.fork(sequence, i) for i in range(1, len(samples))]
            except BaseException as error:
                self.fail(sequence, failure_of(error))
                return
            group.sequences.extend(siblings)
            self.scheduler.add(siblings)
            members += siblings
        for member, sample in zip(members, samples, strict=True):
            self._append(member, sample.token_id, sample)
            if group.done:
                return  # all have ended, or one failed and the request with it

    def _append(self, sequence: Sequence, token_id: int, sampled: Sampled | None) -> None:
        place = len(sequence.tokens)
        try:
            self.writer.write(sequence, token_id, sampled)
        except BaseException as error:
            self.fail(sequence, failure_of(error))
            return
        replaced = len(sequence.tokens) <= place or sequence.tokens[place] != token_id
        if replaced and sequence.progress.num_computed > place:
            rewind(sequence, place)  # the next step ran with a token that the ending has replaced
        self._emit(sequence)

    def finish(self, sequence: Sequence) -> None:
        """A sequence is complete: give its slots back, and end its request with the last of them."""
        if sequence.choice is not None:
            self._scored(sequence, sequence.choice)
            return
        group = sequence.group
        assert group is not None
        self._count(sequence)
        pin = None
        if sequence.request.pin and sequence.progress.status == "running":
            self._cache.publish(sequence)
            pin = self._cache.pin(sequence)
        self.scheduler.remove(sequence, publish=True)
        if self.drafter is not None:
            self.drafter.remember(sequence)
        try:
            group.completions[sequence.index] = self.writer.completion(sequence, pin)
        except BaseException as error:
            self.fail(sequence, failure_of(error))
            return
        if len(group.completions) == sequence.sampling.n or sequence.scoring or sequence.request.want_logits:
            self._groups.pop(group.id, None)
            group.end()
            completion = group.completion
            try:
                group.listener.on_finish(completion)
            except BaseException:
                log.exception("the listener of request %d raised when it was given the completion", group.request.id)
            self.finished(group.request, completion)

    def _count(self, sequence: Sequence) -> None:
        """Count the tokens that were generated since the last call; those of a request that is cancelled later too."""
        tokens, forced = sequence.counted
        sequence.counted = sequence.num_generated, sequence.output.num_forced
        self.counters.completion_tokens += sequence.counted[0] - tokens
        self.counters.forced_tokens += sequence.counted[1] - forced

    def _emit(self, sequence: Sequence) -> None:
        group = sequence.group
        assert group is not None
        self._count(sequence)
        if group.request.stream:
            try:
                if (chunk := self.writer.chunk(sequence)) is not None:
                    group.listener.on_chunk(chunk)
            except BaseException as error:
                self.fail(sequence, error)
                return
        self._choose_or_finish(sequence)

    def spell(self, sequence: Sequence) -> None:
        """Bring a sequence's text up to date."""
        try:
            self.writer.spell(sequence)
        except BaseException as error:
            self.fail(sequence, failure_of(error))

    def _choose_or_finish(self, sequence: Sequence) -> None:
        """End a sequence that is complete; let one that stands before a choice wait until its options are scored."""
        if sequence.output.finish_reason is not None:
            self.finish(sequence)
            return
        try:
            choice = Choice.at(sequence)
        except BaseException as error:
            self.fail(sequence, failure_of(error))
            return
        if choice is not None:
            assert sequence.group is not None
            self.scheduler.hold(sequence)
            sequence.group.sequences.extend(choice.scoring)
            self.scheduler.add(choice.scoring)

    def _scored(self, sequence: Sequence, choice: Choice) -> None:
        """An option is scored; after the last one the sequence goes on with the option that is chosen."""
        group, chooser = sequence.group, choice.sequence
        assert group is not None
        self.scheduler.remove(sequence, publish=True)
        group.sequences.remove(sequence)
        if not choice.scored():
            return
        self.scheduler.resume(chooser, choice.num_reused)
        try:
            self.writer.choose(chooser, choice.best())
        except BaseException as error:
            self.fail(chooser, failure_of(error))
            return
        self._emit(chooser)

    # -- they fail ---------------------------------------------------------------------------------------------

    def cancel(self, submission_id: int, cause: BaseException | None = None) -> None:
        """Drop a request and free its slots; unknown or finished ids are ignored. cause: None if its caller wants it"""
        group = self._groups.get(submission_id)
        if group is not None:
            self.counters.cancelled += cause is None
            self._end(group, cause or RequestCancelled(f"request {group.request.id} was cancelled"))

    def expire(self) -> None:
        """End the requests whose deadline has passed."""
        if not self._timed:
            return
        now = self.clock()
        for group in list(self._timed.values()):
            deadline = group.sequences[0].bounds.deadline_s
            if group.done:
                del self._timed[group.id]
            elif deadline is not None and now > deadline:
                timeout = group.request.sampling.timeout
                self._end(group, RequestTimeout(f"the request did not finish within its {timeout} s timeout"))

    def fail(self, sequence: Sequence, error: BaseException) -> None:
        """End the whole request of a sequence with `error`, unless it has ended."""
        if sequence.group is not None:
            self._end(sequence.group, error)

    def fail_all(self, error: BaseException) -> None:
        """End every request with `error`, whatever state the engine is in; raises what could not be tidied up."""
        with ExitStack() as ends:
            for group in list(self._groups.values()):
                ends.callback(self._end, group, error)

    def _end(self, group: SequenceGroup, error: BaseException) -> None:
        """End every sequence of a request with `error`; what they computed before this step stays cached."""
        if group.done:
            return
        group.end()
        self._groups.pop(group.id, None)
        unopened = self._unopened.pop(group.id, None)
        if unopened is not None:
            abandon(unopened.grammar)
        if not isinstance(error, RequestCancelled):
            self.counters.failed += 1
        try:
            for sequence in group.sequences:
                self.scheduler.remove(sequence, publish=not isinstance(error, EngineError))
        finally:
            self._tell_error(group.listener, error)

    def _tell_error(self, listener: Listener, error: BaseException) -> None:
        try:
            listener.on_error(error)
        except BaseException:
            log.exception("a listener raised when it was told of %r", error)


def abandon(grammar: Future[Grammar] | None) -> None:
    """Give up waiting for a grammar: a compilation for which no other request waits ends."""
    give_up = getattr(grammar, "abandon", None)
    if give_up is not None:
        give_up()
