"""DeviceSampler: samples on the device. Token ids feed the next step there and reach the host later."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import numpy as np
import torch

from graftlm.core.errors import GraftError
from graftlm.core.sampling.distributions import Needs, draw, drawing
from graftlm.core.sampling.sampler import is_unedited, not_finite, nothing_allowed, unpack_masks
from graftlm.kernels.gpu.support import triton_problem
from graftlm.kernels.sampling_codes import NOT_FINITE, NOTHING_ALLOWED
from graftlm.kernels.transfer import Arriving, send

if TYPE_CHECKING:
    from graftlm.core.sampling.step_masks import StepMasks
    from graftlm.core.sequence import Sequence


class Drawn:
    """The tokens of a step, perhaps still being drawn."""

    def __init__(self, sequences: Seq[Sequence], codes: torch.Tensor | None) -> None:
        self._sequences = sequences
        self._codes = None if codes is None else Arriving(codes)

    def result(self) -> Seq[int | GraftError]:
        """Wait for the tokens: for each row the one it drew, or why there is none."""
        if self._codes is None:
            return []
        codes: list[int] = self._codes.wait().tolist()
        if min(codes) >= 0:
            return codes
        return [
            code if code >= 0 else not_finite() if code == NOT_FINITE else nothing_allowed(sequence)
            for code, sequence in zip(codes, self._sequences, strict=True)
        ]


class DeviceSampler:
    """Draws one token for each of up to `max_rows` rows by the definitions of distributions.py, waiting for nothing.

    What is kept per row is a sequence and a number: objects made for each row of each step would have the garbage
    collector run in every step.

    tokens  int64 [max_rows], on the device: what the newest step drew, in the order of its rows. The next step reads
            its input from there. A row that could not be drawn has token 0.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self.device = device
        self._has_triton = triton_problem(device) is None
        self.tokens = torch.zeros(max_rows, dtype=torch.int64, device=device)

    def takes(self, sequence: Sequence) -> bool:
        """Whether `draw` can draw a token for this sequence: of logits as they are or masked."""
        return is_unedited(sequence)

    def draw(self, logits: torch.Tensor, sequences: Seq[Sequence], masks: StepMasks) -> Drawn:
        """Draw a token for each sequence; `takes` each of them.

        logits  [num_rows, vocab_size], a row for each; what masks forbid is overwritten with -inf
        masks   of the rows that have one
        """
        if not sequences:
            return Drawn(sequences, None)
        with torch.inference_mode():
            if masks:
                self._mask(logits, masks)
            if all(sequence.request.sampling.temperature == 0 for sequence in sequences):
                return Drawn(sequences, self._greedy(logits))
            codes = self._by_groups(logits, sequences)
            torch.clamp(codes, min=0, out=self.tokens[: len(sequences)])
            return Drawn(sequences, codes)

    def _greedy(self, logits: torch.Tensor) -> torch.Tensor:
        if self._has_triton:
            from graftlm.kernels.gpu.sampling.argmax import greedy

            return greedy(logits, self.tokens)
        codes = _likeliest(logits)
        torch.clamp(codes, min=0, out=self.tokens[: len(logits)])
        return codes

    def _mask(self, logits: torch.Tensor, masks: StepMasks) -> None:
        members = masks.places
        if self._has_triton:
            from graftlm.kernels.gpu.sampling.token_mask import apply_mask

            apply_mask(logits, masks.on(self.device), send(np.array(members, np.int32), self.device))
        else:
            allowed = unpack_masks(list(masks.values()), logits.shape[1], self.device)
            logits[members] = logits[members].masked_fill(~allowed, -torch.inf)

    def _by_groups(self, logits: torch.Tensor, sequences: Seq[Sequence]) -> torch.Tensor:
        groups: dict[Needs, list[int]] = {}
        for i, sequence in enumerate(sequences):
            groups.setdefault(Needs.of(sequence.request.sampling, few=False, masked=False), []).append(i)
        codes = torch.empty(len(sequences), dtype=torch.int64, device=logits.device)
        for needs, members in groups.items():
            whole = len(members) == len(sequences)
            index = None if whole else send(np.array(members), self.device)
            values = logits if index is None else logits.index_select(0, index)
            group = _likeliest(values) if needs.greedy else self._drawn(values, [sequences[i] for i in members], needs)
            if index is None:
                return group
            codes.index_copy_(0, index, group)
        return codes

    def _drawn(self, logits: torch.Tensor, sequences: Seq[Sequence], needs: Needs) -> torch.Tensor:
        numbers, uniforms = (send(x, self.device) for x in drawing(sequences))
        if self._has_triton and not needs.top_k:
            from graftlm.kernels.gpu.sampling.nucleus import MAX_COLUMNS, draw_nucleus

            if logits.shape[1] <= MAX_COLUMNS:
                return draw_nucleus(logits, numbers, uniforms, top_p=needs.top_p)
        values = logits.float()
        peaks = values.amax(dim=1)
        return _codes(draw(values, peaks, numbers, uniforms, needs)[:, 0], peaks)


def _likeliest(logits: torch.Tensor) -> torch.Tensor:
    if logits.device.type == "cpu":
        logits = logits.float()
    columns = logits.argmax(dim=1, keepdim=True)
    return _codes(columns[:, 0], logits.gather(1, columns)[:, 0])


def _codes(tokens: torch.Tensor, peaks: torch.Tensor) -> torch.Tensor:
    """The tokens, or a code below 0 where there is none. peaks  [num_rows]: the largest logit of each row"""
    failures = torch.where(peaks == -torch.inf, NOTHING_ALLOWED, NOT_FINITE)
    return torch.where(torch.isfinite(peaks), tokens, failures)
