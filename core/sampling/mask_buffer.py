"""Memory for the token masks of one step, which a device reads where they are filled."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from graftlm.core.sampling.step_masks import StepMasks
from graftlm.kernels.transfer import Outgoing

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray


class MaskBuffer:
    """Memory for the masks of one step.

    num_words     of a mask as the device reads it, for the model's vocabulary
    filled_words  of a mask as grammars fill it, for the tokenizer's
    """

    def __init__(self, num_words: int, filled_words: int, device: torch.device | None) -> None:
        self._num_words = num_words
        self._filled_words = filled_words
        self._device = device
        self._kept = self._rows = np.zeros((0, max(num_words, filled_words)), np.int32)
        self._outgoing: Outgoing | None = None

    def take(self, num_rows: int) -> list[NDArray[np.int32]]:
        """Begin a step: rows to fill, int32 [filled_words] each. What they hold is of steps before."""
        shape = num_rows, self._kept.shape[1]
        self._outgoing = None
        if num_rows and self._device is not None and self._device.type == "cuda" and self._num_words == shape[1]:
            self._outgoing = Outgoing(shape, np.int32, self._device)
            rows = self._outgoing.array
        else:
            if num_rows > len(self._kept):
                self._kept = np.zeros(shape, np.int32)
            rows = self._kept[:num_rows]
        rows[:, self._filled_words :] = 0
        self._rows = rows
        return list(rows[:, : self._filled_words])

    def masks(self, numbers: list[int], places: list[int]) -> StepMasks:
        """Those of the rows with these `numbers`, in ascending order, for the sequences at `places`."""
        words = self._rows[:, : self._num_words]
        if len(numbers) == len(words):
            return StepMasks(places, words, self._outgoing)
        return StepMasks(places, words[numbers])
