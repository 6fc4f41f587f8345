"""StepLoop: schedules, launches and completes steps, overlapped where the device samples by itself."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from graftlm.core.errors import EngineError, GraftError
from graftlm.core.execution.step_plan import InFlightStep, PlanRow, ScheduledRow, StepPlan, build_plan
from graftlm.core.sampling.step_sampler import Outcome, PendingTokens, StepSampler
from graftlm.core.scheduling.scheduler import HEADROOM, received, rewind, sent
from graftlm.core.scheduling.speculation import DraftVerifier
from graftlm.core.scheduling.step_retry import goal_of, step_error

if TYPE_CHECKING:
    from graftlm.core.engine_builder import Runner, RunnerSpec
    from graftlm.core.scheduling.request_tracker import RequestTracker
    from graftlm.core.scheduling.step_times import StepPrices
    from graftlm.core.scheduling.steps_ahead import StepsAhead

log = logging.getLogger("graftlm.engine")

HOST_TIME = (1 / 10, 1 / 64)
"""Host time between two steps that are not overlapped, as a share of a step: a minimum, and a share for each row."""

JUMPS_MEMORY = 1 / 4
"""Weight of the newest step in the moving average of the share of rows that get forced tokens."""


class StepLoop:
    """The steps of one engine: `run` schedules rows, lays them out (StepPlan) and launches their forward.

    Overlapped scheduling: on a device that samples by itself the loop launches step n + 1 before it reads the tokens
    of step n, which it feeds to step n + 1 on the device. A row that has ended runs once more; that token is dropped.
    Slots given back while a step still writes to them are written again only by later launches, and a prompt is
    published as soon as its step was launched, for the same reason.

    Rows under a grammar are sampled when the step before theirs has completed, which decides their masks, while their
    own forward runs. If the grammar forces tokens, the row drops its sample and takes them a step later than if it had
    waited. Where that costs more, and where the host must see the logits, each step completes before the next one.

    share_decode  whether rows that decode read the KV of a common prefix once
    device_wait   entered while the loop waits for the device
    num_tokens    run so far
    """

    def __init__(
        self,
        spec: RunnerSpec,
        requests: RequestTracker,
        sampler: StepSampler,
        prices: StepPrices,
        ahead: StepsAhead | None,
        *,
        share_decode: bool,
        device_wait: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.spec = spec
        self.runner: Runner = spec.runner
        self.requests = requests
        self.drafter, self.counters = requests.drafter, requests.counters
        self.scheduler, self.cache = requests.scheduler, requests.scheduler.cache
        self.sampler = sampler
        self.prices = prices
        self.ahead = ahead
        self.share_decode = share_decode
        self.overlapped = spec.device_sampler is not None
        self.device_wait = device_wait
        self.num_tokens = 0
        self._num_steps = 1  # that can be run at once
        self._in_flight: InFlightStep | None = None
        self._jump_share = 1.0  # the share of constrained rows that get forced tokens, over the last steps

    @property
    def idle(self) -> bool:
        return self.scheduler.idle and self._in_flight is None

    def run(self) -> bool:
        """Run one step, or several at once; False if nothing could run."""
        return self._step_overlapped() if self.overlapped else self._step_synchronous()

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
            plan = self.cache.with_states(build_plan(scheduled, share_decode=self.share_decode))
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
        """Count the tokens that a launched step samples on the device, in the order of its tokens."""
        if pending is not None:
            for place, index in enumerate(pending.rows):
                sent(plan.rows[index].sequence, place)

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
        verifier = DraftVerifier(launched.plan, launched.logits, rewind)
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
                received(sequence)
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
        self.num_tokens += num_steps * plan.num_tokens
        self.counters.ran(plan, num_steps, launch_s)
        if not self.overlapped:
            self.prices.ran(plan, num_steps, launch_s)
        self.spec.count_step(launch_s)
