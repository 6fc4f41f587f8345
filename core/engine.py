"""Engine: schedules, launches and completes steps. One thread calls it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING

from graftlm.core.config import EngineConfig
from graftlm.core.errors import EngineError, GraftError
from graftlm.core.execution.step_plan import InFlightStep, PlanRow, ScheduledRow, StepPlan, build_plan
from graftlm.core.kv.memory import give_back
from graftlm.core.kv.prefix_cache import PrefixCache
from graftlm.core.kv.tiers.cache_tiers import CacheTiers
from graftlm.core.metrics import Counters, Stats
from graftlm.core.request import Completion, Request, Submission
from graftlm.core.sampling.step_sampler import Outcome, PendingTokens, StepSampler
from graftlm.core.scheduling.admission import Limits
from graftlm.core.scheduling.output_writer import OutputWriter
from graftlm.core.scheduling.request_tracker import RequestTracker
from graftlm.core.scheduling.scheduler import HEADROOM, Scheduler
from graftlm.core.scheduling.speculation import Drafter, DraftVerifier
from graftlm.core.scheduling.step_retry import goal_of, step_error
from graftlm.core.scheduling.step_times import StepPrices
from graftlm.core.scheduling.steps_ahead import StepsAhead

if TYPE_CHECKING:
    import numpy as np

    from graftlm.core.engine_builder import Runner, RunnerSpec
    from graftlm.core.text.tokenizer import Tokenizer


log = logging.getLogger("graftlm.engine")

HOST_TIME = (1 / 10, 1 / 64)
"""Host time between two steps that are not overlapped, as a share of a step: a minimum, and a share for each row."""

REST_AFTER = 2048
"""Tokens after which a CPU gives memory back to the system: their steps take a hundred times as long as that does."""

JUMPS_MEMORY = 1 / 4
"""Weight of the newest step in the moving average of the share of rows that get forced tokens."""


class LocalEngine:
    """A model in this process, with continuous batching.

    `step` schedules rows, lays them out (StepPlan), launches their forward, and completes the step that was launched
    before: it reads that step's tokens and commits them.

    Overlapped scheduling: on a device that samples by itself the engine launches step n + 1 before it reads the tokens
    of step n, which it feeds to step n + 1 on the device. A row that has ended runs once more; that token is dropped.
    Slots given back while a step still writes to them are written again only by later launches, and a prompt is
    published as soon as its step was launched, for the same reason.

    Rows under a grammar are sampled when the step before theirs has completed, which decides their masks, while their
    own forward runs. If the grammar forces tokens, the row drops its sample and takes them a step later than if it had
    waited. Where that costs more, and where the host must see the logits, each step completes before the next one.
    """

    def __init__(
        self,
        spec: RunnerSpec,
        tokenizer: Tokenizer,
        config: EngineConfig,
        *,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        finished: Callable[[Request, Completion], None] = lambda request, completion: None,
    ) -> None:
        self.config = config
        self.spec = spec
        self.runner: Runner = spec.runner
        self.cache = PrefixCache(spec.num_slots, config.cache, spec.lane, spec.num_states)
        if spec.host_tier is not None:
            self.cache.tiers = CacheTiers(self.cache, spec.host_tier, spec.folder)
        self.counters = Counters()
        self.scheduler = Scheduler(config, self.cache, spec.step_tokens, self.counters, clock)
        self.writer = OutputWriter(tokenizer, min_forced=spec.min_forced if config.jump_forward else 0)
        self.sampler = StepSampler(tokenizer, self.writer, spec.vocab_size, spec.device_sampler)
        self.prices, ends = StepPrices(), tokenizer.eos_token_ids
        self.drafter = Drafter(ends, spec.step_tokens, self.prices) if spec.drafts else None
        self.requests = RequestTracker(
            self.scheduler,
            self.writer,
            self.counters,
            Limits(
                spec.max_model_len,
                spec.num_embeddings,
                self.cache.num_slots,
                extensible=config.max_model_len is not None,
                no_pictures=spec.no_pictures,
            ),
            self.drafter,
            seed=config.seed,
            wake=wake,
            clock=clock,
            finished=finished,
        )
        self.ahead = None if spec.steps is None else StepsAhead(spec.steps, self.scheduler, ends, self.prices)
        self._num_steps = 1  # that can be run at once
        self.waits_for_device = spec.device_sampler is not None
        self.device_wait: Callable[[], AbstractContextManager[None]] = nullcontext  # entered while it does
        self._in_flight: InFlightStep | None = None
        self._num_tokens_run = 0  # tokens, since memory was given back
        self._jump_share = 1.0  # the share of constrained rows that get forced tokens, over the last steps

    @property
    def idle(self) -> bool:
        return self.scheduler.idle and self._in_flight is None

    def add(self, submissions: Seq[Submission]) -> None:
        """Queue requests; one that can never run is refused to its listener."""
        for submission in submissions:
            self.requests.add(submission)

    def step(self) -> bool:
        """Run one step, or several at once; False if nothing could run."""
        started = time.perf_counter()
        self.requests.expire()
        self.requests.open_grammars()
        if not (self._step_overlapped() if self.waits_for_device else self._step_synchronous()):
            tiers = self.cache.tiers
            if tiers is None or not tiers.busy:
                return False
            tiers.wait()  # all that waits does so for its prefix
        self.prices.ended(time.perf_counter() - started)
        if self.idle and self._num_tokens_run >= REST_AFTER and self.spec.device_sampler is None:
            self._num_tokens_run = 0
            give_back()
        if self.idle:
            self.cache.check_idle()  # free + cached + in use == all slots, and none is in use now
            if self.cache.tiers is not None:
                self.cache.tiers.rest()
        return True

    def cancel(self, submission_id: int) -> None:
        """Drop a request and free its slots; unknown or finished ids are ignored."""
        self.requests.cancel(submission_id)

    def interrupt(self, wanted: bool) -> None:
        """Say whether steps that are run at once shall end with the one under way. From any thread."""
        if self.ahead is not None:
            self.ahead.runner.interrupt[0] = wanted

    def fail_all(self, error: BaseException) -> None:
        """End every request with `error`."""
        self.requests.fail_all(error)

    def stats(self) -> Stats:
        states = self.cache.states
        return Stats(
            **asdict(self.counters),
            slots_total=self.cache.num_slots,
            slots_free=self.cache.pool.num_free,
            slots_cached=self.cache.tree.num_tokens,
            slots_in_use=self.cache.num_in_use,
            states_total=states.num_slots if states is not None else 0,
            states_free=states.num_free if states is not None else 0,
            states_cached=states.num_cached if states is not None else 0,
            weights=self.spec.weights,
            kv=self.spec.kv,
            execution=self.spec.execution,
            images_encoded=self.spec.vision.num_encoded if self.spec.vision is not None else 0,
            image_bytes=self.spec.vision.num_bytes if self.spec.vision is not None else 0,
            no_images=self.spec.no_pictures or "",
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            open=self.requests.open,
            tiers=self.cache.tiers.snapshot() if self.cache.tiers is not None else {},
        )

    def reset_stats(self) -> None:
        self.counters.reset()

    def clear_cache(self) -> None:
        """Forget every cached prefix that is neither in use nor pinned."""
        self.cache.clear()
        if self.drafter is not None:
            self.drafter.forget()

    def drop(self, ids: np.ndarray, keep: int) -> None:
        """Free the cached KV of `ids` after the first `keep` tokens, unless something else uses it."""
        tiers = self.cache.tiers
        if tiers is not None:
            tiers.paused = True  # it is not needed in host memory either
        self.cache.pool.free(self.cache.tree.drop(ids, keep))
        if tiers is not None:
            tiers.paused = False

    def unpin(self, pin: int) -> None:
        """Let a pinned prefix be evicted again."""
        self.cache.unpin(pin)

    def close(self) -> None:
        """Leave the model as it was before it was loaded here."""
        if self.cache.tiers is not None:
            self.cache.tiers.close()
        self.spec.close()

    def check_integrity(self) -> None:
        """Raise AssertionError unless free + cached + in use == all slots. For tests."""
        self.cache.check_integrity(self.scheduler.running)

    # -- a step ------------------------------------------------------------------------------------------------

    def _step_overlapped(self) -> bool:
        """Launch a step, then complete the one that was launched before it; False if there was nothing to do."""
        in_flight, num_failed = self._in_flight, self.counters.failed_steps
        if in_flight is not None and (
            self.scheduler.retry.active or self._needs_room() or self._awaits_jumps(in_flight)
        ):
            self._complete_step()
        plan = self._plan()
        if plan is None:
            return self._complete_step() or self.counters.failed_steps > num_failed
        launched, num_failed = self._launch(plan), self.counters.failed_steps
        self._complete_step()
        if self.counters.failed_steps > num_failed:
            return True  # the launched sequences wait again
        if launched is not None and (launched.pending is not None or self._draw(launched)):
            self._in_flight = launched
        return True

    def _step_synchronous(self) -> bool:
        """Run a step and commit its tokens, or several steps at once; False if nothing could run."""
        num_failed, plan = self.counters.failed_steps, self._plan()
        if plan is None:
            return self.counters.failed_steps > num_failed
        if not self._run_ahead(plan):
            self._in_flight = self._launch(plan)
            self._complete_step()
        return True

    def _plan(self) -> StepPlan | None:
        """Schedule and lay out the next step; None if nothing can run."""
        started = time.perf_counter()
        scheduled = self.scheduler.schedule()
        failures = self.scheduler.failures
        self._num_steps = self.ahead.num_steps(scheduled) if self.ahead is not None else 1
        if self.drafter is not None:
            scheduled = self.drafter.extend(scheduled, self._num_steps)
            self._num_steps = min(self._num_steps, self.drafter.patience)
            failures += self.drafter.failures
            self.drafter.failures.clear()
        if failures:
            for sequence, error in failures:
                self.requests.fail(sequence, error)
            failures.clear()
            # a request that fails takes its other sequences with it
            scheduled = [row for row in scheduled if row.sequence.progress.status == "running"]
        if not scheduled:
            return None
        try:
            plan = self.cache.with_states(build_plan(scheduled, share_decode=self.config.shared_prefix_decode))
        except BaseException as error:
            self._fail_step(scheduled, error)
            return None
        self.counters.schedule_s += time.perf_counter() - started
        return plan

    def _needs_room(self) -> bool:
        """Whether to complete the step in flight first, so that ended rows free their slots and none is retracted."""
        return self.cache.num_available < HEADROOM * len(self.scheduler.running)

    def _awaits_jumps(self, launched: InFlightStep) -> bool:
        """Whether to complete a step before scheduling the next: overlap costs each row with forced tokens a step."""
        least, each = HOST_TIME
        return self._jump_share > least + each * len(launched.plan.rows) and launched.constrained

    def _launch(self, plan: StepPlan) -> InFlightStep | None:
        """Launch a step; None if it failed. Its prompts' KV is published at once: steps that read it launch later."""
        started = time.perf_counter()
        try:
            logits = self.runner.forward(plan.wire)
            pending = self.sampler.sample_async(plan, logits)
        except BaseException as error:  # whatever a model or kernel raises belongs to the requests of this step
            self._fail_step(plan.rows, error)
            return None
        self.scheduler.launched(plan)
        self._await_tokens(plan, pending)
        self._count_step(plan, time.perf_counter() - started)
        return InFlightStep(plan, logits, pending)

    def _run_ahead(self, plan: StepPlan) -> bool:
        """Run a step and those after it at once, as far as nobody is needed between; False if that is one step."""
        if self.ahead is None:
            return False
        started = time.perf_counter()
        try:
            tokens = self.ahead.run(plan, self._num_steps)
        except BaseException as error:
            self._fail_step(plan.rows, error)
            return True
        if tokens is None:
            return False
        ran = time.perf_counter()
        self._count_step(plan, ran - started, len(tokens))
        self.ahead.commit(plan, tokens, self.requests)
        self.counters.commit_s += time.perf_counter() - ran
        return True

    def _draw(self, launched: InFlightStep) -> bool:
        """Sample a step whose predecessors have completed; False if that completes it, or fails."""
        started = time.perf_counter()
        try:
            launched.pending = self.sampler.sample_constrained(launched.plan, launched.logits)
        except BaseException as error:
            self._fail_step(launched.plan.rows, error)
            return False
        self.counters.sample_s += time.perf_counter() - started
        if launched.pending is None:
            self._in_flight = launched
            self._complete_step()
            return False
        self._await_tokens(launched.plan, launched.pending)
        return True

    def _await_tokens(self, plan: StepPlan, pending: PendingTokens | None) -> None:
        if pending is not None:
            self.scheduler.await_tokens(plan.rows[index].sequence for index in pending.rows)

    def _complete_step(self) -> bool:
        """Read and commit the step in flight; False if there is none."""
        launched, self._in_flight = self._in_flight, None
        if launched is None:
            return False
        plan, pending, counters = launched.plan, launched.pending, self.counters
        if pending is not None:
            self._prepare_last_tokens(plan, pending)
        started = time.perf_counter()
        try:
            with self.device_wait():
                sampler = self.sampler
                outcomes = sampler.sample(plan, launched.logits) if pending is None else sampler.results(plan, pending)
            self.spec.check_step()
        except BaseException as error:
            self._fail_step(plan.rows, error)
            return True
        chosen = time.perf_counter()
        self._commit(launched, outcomes)
        if plan.num_drafts:
            self._verify_drafts(launched)
        if pending is None:
            counters.sample_s += chosen - started
        else:
            counters.forward_s += chosen - started
        counters.commit_s += time.perf_counter() - chosen
        return True

    def _verify_drafts(self, launched: InFlightStep) -> None:
        """Verify drafts position by position: where the committed token is the draft, sample the next position too."""
        verifier = DraftVerifier(launched.plan, launched.logits, self.scheduler.rewind)
        accepted_before = self.counters.accepted_tokens
        if verifier.greedy:
            verifier.commit(self.sampler.sampler.likeliest(launched.logits), self.requests)
            self.counters.accepted_tokens += verifier.num_accepted
            return
        while (further := verifier.following()) is not None:
            self.counters.accepted_tokens = accepted_before + verifier.num_accepted
            try:
                outcomes = self.sampler.sample(*further)
            except BaseException as error:
                self._fail_step(further.plan.rows, error)
                break
            self._commit(InFlightStep(*further, None), outcomes)

    def _prepare_last_tokens(self, plan: StepPlan, pending: PendingTokens) -> None:
        """While the device runs the last step of some rows, publish their KV and decode their text so far."""
        for index in pending.rows:
            sequence = plan.rows[index].sequence
            if sequence.progress.status == "running" and sequence.remaining <= 1:
                self.cache.publish(sequence)
                self.requests.spell(sequence)

    def _commit(self, launched: InFlightStep, outcomes: list[Outcome]) -> None:
        """Append what was sampled, end what has ended."""
        plan, pending = launched.plan, launched.pending
        places = pending.rows if pending is not None else [i for i, num in enumerate(plan.num_logits_per_row) if num]
        num_constrained = num_jumps = 0
        for place in places:
            sequence, outcome = plan.rows[place].sequence, outcomes[place]
            if sequence.progress.status == "finished":
                continue  # it ended while this step was under way
            if pending is not None:
                self.scheduler.received(sequence)
            if isinstance(outcome, GraftError):
                self.requests.fail(sequence, outcome)
            elif outcome is not None:
                constrained, num_tokens = sequence.output.matcher is not None, sequence.num_tokens
                self.requests.append(sequence, outcome)
                num_constrained += constrained
                num_jumps += constrained and sequence.num_tokens > num_tokens + 1
            elif sequence.num_pending == 0:
                self.requests.finish(sequence)
        if num_constrained:
            self._jump_share += JUMPS_MEMORY * (num_jumps / num_constrained - self._jump_share)

    # -- failures ----------------------------------------------------------------------------------------------

    def _fail_step(self, rows: Seq[ScheduledRow | PlanRow], error: BaseException) -> None:
        """After a step has raised, run its sequences again in parts, and end the request of one that ran alone.

        Raises EngineError if the device will run no other step.
        """
        self.counters.failed_steps += 1
        num_failed = self.counters.failed_steps
        goals = {row.sequence: goal_of(row) for row in rows if row.sequence.progress.status != "finished"}
        try:
            self.spec.check_device()
        except EngineError as lost:  # another process of the model
            for sequence in goals:
                self.requests.fail(sequence, lost)
            raise
        except Exception:
            for sequence in goals:
                self.requests.fail(sequence, step_error(f"a step of {len(rows)} sequences failed", error))
            reason = " ".join([f"{type(error).__name__}:", *str(error).splitlines()[:1]])  # CUDA adds advice
            raise EngineError(f"the device cannot be used any more after {reason}; start a new process") from error
        self._complete_step()  # its tokens are good
        if self.counters.failed_steps > num_failed:
            return  # it failed too, and its sequences are the same
        self.scheduler.retract_all()
        goals = {sequence: goal for sequence, goal in goals.items() if sequence.progress.status == "waiting"}
        if not goals:
            return
        cause = self.scheduler.retry.failed(goals)
        if cause is not None:
            self.requests.fail(cause, step_error("a step of this sequence alone failed", error))
        else:
            log.warning("a step of %d sequences failed; they run again in parts", len(goals), exc_info=error)

    def _count_step(self, plan: StepPlan, launch_s: float, num_steps: int = 1) -> None:
        self._num_tokens_run += num_steps * plan.num_tokens
        self.counters.ran(plan, num_steps, launch_s)
        if not self.waits_for_device:
            self.prices.ran(plan, num_steps, launch_s)
        self.spec.count_step(launch_s)
