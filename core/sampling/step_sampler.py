"""StepSampler: from the logits of a step to the outcome of each row: tokens, scores, or the logits themselves."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from graftlm.core.errors import GraftError, failure_of
from graftlm.core.sampling.sampler import Sampled, Sampler, SampleRow, score_logprobs
from graftlm.core.sampling.step_masks import MaskBuffer, MaskJob, StepMasks, fill
from graftlm.core.sequence import Sequence
from graftlm.kernels.transfer import send

if TYPE_CHECKING:
    import torch

    from graftlm.core.execution.step_plan import StepPlan
    from graftlm.core.grammar.matcher import Matcher
    from graftlm.core.sampling.device_sampler import DeviceSampler, Drawn
    from graftlm.core.scheduling.output_writer import OutputWriter
    from graftlm.core.text.tokenizer import Tokenizer

Outcome = int | list[Sampled] | GraftError | None
"""The result of a row in a step: its token, or samples with log-probabilities; the error that stops it; or None."""


class PendingTokens(NamedTuple):
    """Tokens of some rows of a plan that the device samples.

    rows      their indices, in the order of the tokens
    failures  errors of rows whose own matcher raised, by place among `rows`
    """

    rows: tuple[int, ...]
    drawn: Drawn
    failures: dict[int, GraftError]


class StepSampler:
    """Samples a step's rows.

    With `device_sampler`, rows that it takes are sampled on the device, and nobody waits: unconstrained rows as soon
    as the step was launched (`sample_async`), rows under a grammar once the step before has completed, which decides
    their masks (`sample_constrained`). Either way the next step may be launched before the tokens are known.
    """

    def __init__(
        self, tokenizer: Tokenizer, writer: OutputWriter, vocab_size: int, device_sampler: DeviceSampler | None
    ) -> None:
        self.sampler = Sampler(vocab_size, tokenizer.eos_token_ids)
        self.writer = writer
        self.device_sampler = device_sampler
        device = None if device_sampler is None else device_sampler.device
        # a tokenizer may have more ids than the model gives logits for
        self._buffer = MaskBuffer((vocab_size + 31) // 32, (len(tokenizer.token_bytes) + 31) // 32, device)

    def sample_async(self, plan: StepPlan, logits: torch.Tensor) -> PendingTokens | None:
        """Draw the step's tokens without waiting for them; None if a row's token depends on what the host does."""
        if self.device_sampler is None or any(row.sequence.constrained for row in plan.rows):
            return None
        return self._draw_on_device(plan, logits, [i for i, num in enumerate(plan.num_logits_per_row) if num])

    def sample_constrained(self, plan: StepPlan, logits: torch.Tensor) -> PendingTokens | None:
        """Draw as `sample_async` does, once all tokens before this step are known, which decide the masks.

        Rows that ended with these tokens, or got forced ones after them, draw none.
        """
        if self.device_sampler is None:
            return None
        return self._draw_on_device(plan, logits, _waiting(plan))

    def results(self, plan: StepPlan, pending: PendingTokens) -> list[Outcome]:
        """Per plan row, what was drawn on the device; None where nothing was. Waits for it."""
        outcomes: list[Outcome] = [None] * len(plan.rows)
        for place, (index, outcome) in enumerate(zip(pending.rows, pending.drawn.result(), strict=True)):
            outcomes[index] = pending.failures.get(place, outcome)
        return outcomes

    def _draw_on_device(self, plan: StepPlan, logits: torch.Tensor, members: list[int]) -> PendingTokens | None:
        assert self.device_sampler is not None
        if any(_needs_host(row.sequence) for row in plan.rows):
            return None
        sequences = [plan.rows[i].sequence for i in members]
        if not all(map(self.device_sampler.takes, sequences)):
            return None
        masks, failures = self._masks_of(sequences)
        if len(members) < len(logits):
            offsets = np.cumsum(plan.num_logits_per_row)[members] - 1  # a row that is drawn has one logit row
            logits = logits.index_select(0, send(offsets, logits.device))
        return PendingTokens(tuple(members), self.device_sampler.draw(logits, sequences, masks), failures)

    def _masks_of(self, sequences: list[Sequence]) -> tuple[StepMasks, dict[int, GraftError]]:
        """Prepare sequences for their next token.

        -> by place: the masks of those that may not get every token, and the errors of those whose own matcher raised
        """
        constrained: list[tuple[int, Matcher]] = []
        failures: dict[int, GraftError] = {}  # their tokens are drawn with the others, and dropped
        for place, sequence in enumerate(sequences):
            try:
                self.writer.begin(sequence)
            except BaseException as error:
                failures[place] = failure_of(error)
                continue
            if sequence.output.matcher is not None:
                constrained.append((place, sequence.output.matcher))
        rows = self._buffer.take(len(constrained))
        filled = fill([MaskJob(place, matcher, row) for (place, matcher), row in zip(constrained, rows, strict=True)])
        numbers, places = [], []
        for number, (place, _) in enumerate(constrained):
            found = filled[place]
            if isinstance(found, GraftError):
                failures[place] = found
            elif found:
                numbers.append(number)
                places.append(place)
        return self._buffer.masks(numbers, places), failures

    def sample(self, plan: StepPlan, logits: torch.Tensor) -> list[Outcome]:
        """Per plan row, its outcome. Rows whose sequence ended meanwhile, or has tokens to compute, get None."""
        outcomes: list[Outcome] = [None] * len(plan.rows)
        offset = 0
        offsets: list[int] = []
        for row, num_logits in zip(plan.rows, plan.num_logits_per_row, strict=True):
            sequence = row.sequence
            offsets.append(offset)
            if sequence.progress.status != "finished" and sequence.scoring:
                _score(sequence, row.past, logits[offset : offset + num_logits])
            elif sequence.progress.status != "finished" and num_logits and sequence.request.want_logits:
                sequence.readout.logits = logits[offset].float().numpy(force=True).copy()
            offset += num_logits
        targets = [i for i in _waiting(plan) if not _gives_no_token(plan.rows[i].sequence)]
        if targets:
            picked = [offsets[i] for i in targets]
            chosen = logits if len(picked) == len(logits) else logits[picked]
            for target, outcome in zip(
                targets, self._draw(chosen, [plan.rows[i].sequence for i in targets]), strict=True
            ):
                outcomes[target] = outcome
        return outcomes

    def _draw(self, logits: torch.Tensor, sequences: list[Sequence]) -> Seq[Outcome]:
        masks, failures = self._masks_of(sequences)
        counts = [sequence.sampling.n if sequence.forks else 1 for sequence in sequences]
        outcomes: Seq[Outcome]
        if self.device_sampler is not None and max(counts) == 1 and all(map(self.device_sampler.takes, sequences)):
            outcomes = self.device_sampler.draw(logits, sequences, masks).result()
        else:
            rows = zip(sequences, counts, strict=True)
            outcomes = self.sampler.sample(logits, [SampleRow(s, masks.get(i), num) for i, (s, num) in enumerate(rows)])
        return [failures.get(i, outcome) for i, outcome in enumerate(outcomes)] if failures else outcomes


def _waiting(plan: StepPlan) -> list[int]:
    """The rows that wait for a token: with logits, and with no token after the one that these follow."""
    return [
        index
        for index, (row, num_logits) in enumerate(zip(plan.rows, plan.num_logits_per_row, strict=True))
        if num_logits and row.sequence.progress.status == "running" and row.sequence.num_pending == 0
    ]


def _gives_no_token(sequence: Sequence) -> bool:
    return sequence.scoring or sequence.request.want_logits


def _needs_host(sequence: Sequence) -> bool:
    """Whether what the sequence gets of a step is not one token."""
    return _gives_no_token(sequence) or sequence.forks


def _score(sequence: Sequence, past: int, logits: torch.Tensor) -> None:
    ids = sequence.request.score_ids
    assert ids is not None
    first = max(past - sequence.first_logit, 0)
    if len(logits):
        num_top = sequence.sampling.top_logprobs
        del sequence.readout.scores[first:]  # of a step that is run again
        sequence.readout.scores.extend(score_logprobs(logits, ids[first : first + len(logits)], num_top))
