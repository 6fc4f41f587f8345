"""From the logits of a step to what its rows get: tokens, scores, or the logits themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from graftlm.core.errors import GraftError
from graftlm.core.request import Sequence
from graftlm.core.sampler import Sampled, Sampler, SampleRow, score_logprobs

if TYPE_CHECKING:
    import torch

    from graftlm.core.device_sampler import DeviceSampler, Drawn
    from graftlm.core.plan import StepPlan
    from graftlm.core.tokenizer import Tokenizer
    from graftlm.core.writer import Writer

Outcome = list[Sampled] | GraftError | None
"""What a row gets of a step: its samples, the error that stops it, or None where nothing is sampled."""


class StepSampler:
    """Samples a step's rows.

    With `drawer`, rows that it takes are drawn on the device. A step of nothing but unconstrained ones is drawn
    `ahead`: nobody waits, and the next step may be launched before the tokens are known.
    """

    def __init__(self, tokenizer: Tokenizer, writer: Writer, vocab_size: int, drawer: DeviceSampler | None) -> None:
        self.sampler = Sampler(vocab_size, tokenizer.eos_token_ids)
        self.writer = writer
        self.drawer = drawer
        self._mask_words = (len(tokenizer.token_bytes) + 31) // 32
        self._masks = np.zeros((0, (vocab_size + 31) // 32), np.int32)

    def ahead(self, plan: StepPlan, logits: torch.Tensor) -> Drawn | None:
        """Draw the step's tokens without waiting for them; None if a row's token depends on what the host does."""
        if self.drawer is None:
            return None
        rows: list[SampleRow] = []
        for row, num_logits in zip(plan.rows, plan.num_logits_per_row, strict=True):
            if not num_logits:
                continue
            sequence = row.sequence
            if _needs_host(sequence):
                return None
            self.writer.begin(sequence)
            rows.append(SampleRow(sequence))
        if not all(map(self.drawer.takes, rows)):
            return None
        return self.drawer.draw(logits, rows)

    def landed(self, plan: StepPlan, drawn: Drawn) -> list[Outcome]:
        """Per plan row, what was drawn ahead. Waits for it."""
        tokens = iter(drawn.result())
        return [next(tokens) if num_logits else None for num_logits in plan.num_logits_per_row]

    def sample(self, plan: StepPlan, logits: torch.Tensor) -> list[Outcome]:
        """Per plan row, its outcome. Rows whose sequence ended meanwhile get None."""
        outcomes: list[Outcome] = [None] * len(plan.rows)
        picked: list[int] = []
        rows: list[SampleRow] = []
        targets: list[int] = []
        constrained = sum(bool(row.sequence.grammar or row.sequence.matcher) for row in plan.rows)  # forks: a matcher
        if constrained > len(self._masks):
            self._masks = np.zeros((constrained, self._masks.shape[1]), np.int32)
        offset = used = 0
        for index, (row, num_logits) in enumerate(zip(plan.rows, plan.num_logits_per_row, strict=True)):
            sequence = row.sequence
            if sequence.status == "finished":
                pass
            elif sequence.scoring:
                _score(sequence, row.past, logits[offset : offset + num_logits])
            elif num_logits and sequence.request.want_logits:
                sequence.logits = logits[offset].float().numpy(force=True).copy()
            elif num_logits:
                self.writer.begin(sequence)
                mask = None
                if sequence.matcher is not None:
                    mask, used = self._mask(sequence, used)
                picked.append(offset)
                rows.append(SampleRow(sequence, mask, sequence.sampling.n if forks(sequence) else 1))
                targets.append(index)
            offset += num_logits
        if rows:
            chosen = logits if len(picked) == len(logits) else logits[picked]
            for target, outcome in zip(targets, self._draw(chosen, rows), strict=True):
                outcomes[target] = outcome
        return outcomes

    def _draw(self, logits: torch.Tensor, rows: list[SampleRow]) -> list[list[Sampled] | GraftError]:
        if self.drawer is not None and all(map(self.drawer.takes, rows)):
            return self.drawer.draw(logits, rows).result()
        return self.sampler.sample(logits, rows)

    def _mask(self, sequence: Sequence, used: int) -> tuple[np.ndarray | None, int]:
        assert sequence.matcher is not None
        row = self._masks[used]
        row[:] = 0
        return (row, used + 1) if sequence.matcher.fill_mask(row[: self._mask_words]) else (None, used)


def forks(sequence: Sequence) -> bool:
    """Whether the sequence is about to become the several that its request asks for."""
    group = sequence.group
    return group is not None and len(group.sequences) < sequence.sampling.n


def _needs_host(sequence: Sequence) -> bool:
    """Whether what the sequence gets of a step depends on its tokens so far, or is no token."""
    constrained = sequence.grammar is not None or sequence.matcher is not None
    return constrained or sequence.scoring or sequence.request.want_logits or forks(sequence)


def _score(sequence: Sequence, past: int, logits: torch.Tensor) -> None:
    ids = sequence.request.score_ids
    assert ids is not None
    first = max(past - sequence.first_logit, 0)
    if len(logits):
        sequence.scores.extend(score_logprobs(logits, ids[first : first + len(logits)]))
