"""StatePool: the states of all layers with a state, one slot for each sequence or checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from graftlm.kernels.transfer import send

COPY_BYTES = 1 << 28
"""Bytes that are copied at once, through a buffer: states of hundreds of sequences are larger than the free memory."""

ALIGNMENT = 32
"""Elements to whose multiples each layer's part of a slot is aligned, for vector loads."""


class StateShape(NamedTuple):
    """One tensor of a layer's state. shape: without the slots"""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        return -(-int(np.prod(self.shape)) // ALIGNMENT) * ALIGNMENT


def slot_bytes(layers: Sequence[Sequence[StateShape]]) -> int:
    """Return the bytes of one slot: the states of all layers of one sequence."""
    return sum(tensor.size * tensor.dtype.itemsize for tensor in chain.from_iterable(layers))


class StatePool:
    """States of sequences and checkpoints by slot.

    layers  for each layer with a state its tensors [num_slots, *shape]: views of one block per dtype, in which a slot
            is contiguous, so that one operation per dtype copies it
    """

    def __init__(
        self, layers: Sequence[Sequence[StateShape]], num_slots: int, device: torch.device | str = "cpu"
    ) -> None:
        self.num_slots = num_slots
        self.device = torch.device(device)
        sizes: dict[torch.dtype, int] = {}
        for tensor in chain.from_iterable(layers):
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.size
        self._blocks = {
            dtype: torch.zeros(num_slots, size, dtype=dtype, device=self.device) for dtype, size in sizes.items()
        }
        self._taken = dict.fromkeys(sizes, 0)
        self.layers = [tuple(map(self._view, tensors)) for tensors in layers]

    @property
    def parts(self) -> list[torch.Tensor]:
        """Return all that slots hold, [num_slots, any] each."""
        return list(self._blocks.values())

    def _view(self, tensor: StateShape) -> torch.Tensor:
        first = self._taken[tensor.dtype]
        self._taken[tensor.dtype] = first + tensor.size
        part: torch.Tensor = self._blocks[tensor.dtype][:, first : first + int(np.prod(tensor.shape))]
        return part.view(self.num_slots, *tensor.shape)

    def copy(self, copies: NDArray[np.int64]) -> None:
        """Copy slots, all at once: every source is read before any destination is written.

        copies  int64 [num_copies, 2]: destination and source, no destination twice
        """
        if not len(copies):
            return
        to, source = send(np.ascontiguousarray(copies.T), self.device)
        width = max(COPY_BYTES // len(copies) // 8, 1)
        for block in self._blocks.values():
            for piece in block.view(torch.int64).split(width, 1):
                piece.index_copy_(0, to, piece.index_select(0, source))
