"""The token masks of a step's rows, side by side in memory that a device reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from graftlm.kernels.transfer import Outgoing, send

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray


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
