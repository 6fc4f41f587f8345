"""Token masks of a step: rows in memory that a device reads, filled by matchers on several threads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from graftlm.core.errors import GraftError, failure_of
from graftlm.kernels.transfer import Outgoing, send

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from graftlm.core.grammar.matcher import MaskRow, Matcher

_LEAST = 3
"""Rows that are worth a thread: handing them over costs about as much as a cheap mask."""


class StepMasks(Mapping[int, "NDArray[np.int32]"]):
    """By place in the step: the mask of a row that may not get every token, int32 [num_words], bit set = allowed."""

    def __init__(self, places: list[int], words: NDArray[np.int32], outgoing: Outgoing | None = None) -> None:
        """words  int32 [len(places), num_words], of `outgoing` if that is given: its first rows"""
        self.places = places
        self._words = words
        self._outgoing = outgoing
        self._rows: dict[int, NDArray[np.int32]] = dict(zip(places, words, strict=True))

    def __getitem__(self, place: int) -> NDArray[np.int32]:
        return self._rows[place]

    def __iter__(self) -> Iterator[int]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)

    def on(self, device: torch.device) -> torch.Tensor:
        """The masks on `device`, int32 [num_masks, num_words]; they may not be changed afterwards."""
        return send(self._words, device) if self._outgoing is None else self._outgoing.send(len(self))


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
        """Return the masks of the rows with these `numbers`, in ascending order, for the sequences at `places`."""
        words = self._rows[:, : self._num_words]
        if len(numbers) == len(words):
            return StepMasks(places, words, self._outgoing)
        return StepMasks(places, words[numbers])


class MaskJob(NamedTuple):
    """One row to fill: its place among the sequences, who fills it, and the row, with anything in it."""

    place: int
    matcher: Matcher
    row: MaskRow


Filled = dict[int, "bool | GraftError"]
"""By place: whether the mask need be applied, or what its matcher raised."""


def fill(jobs: Sequence[MaskJob]) -> Filled:
    """Fill all rows. What a matcher raises is its own row's."""
    shared = [job for job in jobs if getattr(job.matcher, "fills_outside_lock", False)]
    if len(shared) < 2 * _LEAST:
        return _fill(jobs)
    from graftlm.core.grammar.masks import workers

    num_parts = min(workers.masks.count + 1, len(shared) // _LEAST)
    elsewhere = [workers.masks.submit(_fill, shared[part::num_parts]) for part in range(1, num_parts)]
    own = {job.place for part in range(1, num_parts) for job in shared[part::num_parts]}
    filled = _fill([job for job in jobs if job.place not in own])
    for part in elsewhere:
        filled.update(part.result())
    return filled


def _fill(jobs: Sequence[MaskJob]) -> Filled:
    filled: Filled = {}
    for place, matcher, row in jobs:
        row[:] = 0
        try:
            filled[place] = matcher.fill_mask(row)
        except BaseException as error:  # the panic of a library in Rust is no Exception
            filled[place] = failure_of(error)
    return filled
