"""StepsAhead: decode steps that are run at once, because nobody is needed between them.

A small model's step on a CPU takes a millisecond or two, and half as long again goes by before the next: tokens are
read, committed, and laid out for it. Where every row takes the likeliest token and its text decides nothing, the
compiled code that runs a step can choose the tokens itself and go on. Answers are those of single steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from graftlm.core.execution.step_plan import PlanRow, ScheduledRow, StepPlan
from graftlm.core.sampling.sampler import is_greedy, not_finite
from graftlm.core.scheduling.scheduler import AHEAD, Scheduler
from graftlm.core.scheduling.step_times import StepPrices
from graftlm.kernels.wire_plan import WirePlan

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from graftlm.core.scheduling.request_tracker import RequestTracker
    from graftlm.core.sequence import Sequence

MAX_S = 0.1
"""About the longest time of steps that are run at once: deadlines are looked at after it."""


class StepRunner(Protocol):
    """Runs several steps of rows that take the likeliest token each.

    interrupt  int64 [1], which any thread may set: if it is not 0, the step under way is the last
    """

    interrupt: NDArray[np.int64]

    def decode(self, plan: WirePlan, ends: Seq[Seq[int]], num_steps: int) -> NDArray[np.int64] | None:
        """Run the step of `plan`, in which each row has one new token and one row of logits, and those after it.

        ends  for each row the tokens that end it; the step after which one has ended is the last
        -> int64 [1 to num_steps, num_rows], the tokens of each step, -1 where logits are not finite; None, with
        nothing done, for a plan that this cannot run
        """
        ...


class StepsAhead:
    """Runs as many steps at once as nobody is needed between, of at most AHEAD tokens and MAX_S seconds.

    That is while no request waits, each running one decodes greedily, and nothing but a token can end one: no stop
    string, no grammar, no reader of a stream. A task for the engine's thread interrupts them.
    """

    def __init__(self, runner: StepRunner, scheduler: Scheduler, eos_token_ids: Seq[int], prices: StepPrices) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self._eos = tuple(eos_token_ids)
        self._prices = prices

    def num_steps(self, scheduled: Seq[ScheduledRow]) -> int:
        """How many steps of these rows nobody is needed between; 1 for a step that is one by itself."""
        scheduler = self.scheduler
        if scheduler.waiting or scheduler.retry.active or not scheduled or not self._prices.known:
            return 1
        if not all(row.num_new == 1 and row.num_logits and _is_plain(row.sequence) for row in scheduled):
            return 1
        in_time = int(MAX_S / max(self._prices.forwards.of(len(scheduled)), MAX_S / AHEAD))
        return max(1, min(in_time, *(row.sequence.remaining for row in scheduled)))

    def run(self, plan: StepPlan, num_steps: int) -> NDArray[np.int64] | None:
        """Run `plan`, which nothing was added to, and the steps after it, as far as their slots follow one another.

        -> tokens, as of StepRunner.decode; None, with nothing done, for a step that is one by itself
        """
        num_steps = min(num_steps, *map(_num_slots, plan.rows))
        if num_steps < 2 or not plan.wire.is_decode:
            return None
        return self.runner.decode(plan.wire, [self._ends(row.sequence) for row in plan.rows], num_steps)

    def commit(self, plan: StepPlan, tokens: NDArray[np.int64], requests: RequestTracker) -> None:
        """Append what the steps have chosen."""
        self.scheduler.launched(plan, len(tokens))
        for of_step in tokens.tolist():
            for row, token_id in zip(plan.rows, of_step, strict=True):
                if row.sequence.progress.status != "running":
                    continue  # it failed
                if token_id < 0:
                    requests.fail(row.sequence, not_finite())
                else:
                    requests.append(row.sequence, token_id)

    def _ends(self, sequence: Sequence) -> tuple[int, ...]:
        stops = sequence.sampling.stop_token_ids
        return (*stops,) if sequence.sampling.ignore_eos else (*self._eos, *stops)


def _is_plain(sequence: Sequence) -> bool:
    """Whether the sequence takes the likeliest token, and the host has nothing to do until a token ends it."""
    request = sequence.request
    return (
        is_greedy(sequence)
        and not (sequence.constrained or sequence.scoring or request.want_logits or sequence.forks)
        and not (request.stream or request.sampling.stop)
        and sequence.output.detokenizer is not None
        and sequence.num_pending == 1
    )


def _num_slots(row: PlanRow) -> int:
    """The slots from that of the row's new token on that follow one another."""
    position = row.past
    for start, stop in row.slot_map.extents:
        if position < stop - start:
            return stop - start - position
        position -= stop - start
    return 0
