"""StateStep: the rows of one step for layers with a state."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from graftlm.kernels.transfer import send
from graftlm.kernels.wire_plan import WirePlan

MAX_CHUNK = 64
"""Tokens of a chunk: its work grows with the square, the number of sequential steps falls."""

MIN_CHUNK = 16
"""Tokens of a chunk at least: shorter matrices are no faster."""


class Taps(NamedTuple):
    """Positions of a convolution's inputs among the rows' cached inputs, row by row, followed by the new tokens.

    inputs  int64 [num_tokens, kernel_size]: the inputs of each token
    last    int64 [num_rows, kernel_size - 1]: the inputs that each row keeps for its next token
    """

    inputs: torch.Tensor
    last: torch.Tensor


class Chunks(NamedTuple):
    """Rows cut into chunks of equal length. The chunks are ordered by their number within the row, then by row.

    size    tokens of a chunk
    tokens  int64 [num_chunks, size]: the token at each place; num_tokens where there is none
    places  int64 [num_tokens]: the place of each token among all places of all chunks
    active  the number of rows that have an i-th chunk: those are the first rows
    firsts  int64 [most chunks of a row]: the i-th chunk of the first row
    counts  int64 [num_rows]: the chunks of each row
    """

    size: int
    tokens: torch.Tensor
    places: torch.Tensor
    active: tuple[int, ...]
    firsts: torch.Tensor
    counts: torch.Tensor


class RaggedRows:
    """The rows of several new tokens, the longest first.

    slots       int64 [num_rows], on the device: in the order of `lengths`
    lengths     new tokens of each row, descending
    starts      the first token of each row, counted from the first token of all these rows
    num_tokens  of all rows
    """

    def __init__(self, lengths: NDArray[np.int64], slots: NDArray[np.int64], device: torch.device) -> None:
        order = np.argsort(-lengths, kind="stable")
        self.device = device
        self.num_tokens = int(lengths.sum())
        self.lengths = lengths[order]
        self.starts = (np.cumsum(lengths) - lengths)[order]
        self.slots = send(slots[order], device)
        self._taps: dict[int, Taps] = {}
        size = MIN_CHUNK if device.type == "cpu" else MAX_CHUNK  # kernels of other sizes would compile in a request
        while size < min(MAX_CHUNK, int(lengths.max())):
            size *= 2
        self.chunks = self._cut(size)

    def _cut(self, size: int) -> Chunks:
        num_chunks = -(-self.lengths // size)
        active = [int((num_chunks > i).sum()) for i in range(int(num_chunks[0]))]
        tokens = np.full((sum(active), size), self.num_tokens, np.int64)
        chunk = 0
        for i, num_rows in enumerate(active):
            for row in range(num_rows):
                first, left = self.starts[row] + i * size, min(size, self.lengths[row] - i * size)
                tokens[chunk, :left] = np.arange(first, first + left)
                chunk += 1
        places = np.empty(self.num_tokens, np.int64)
        flat = tokens.reshape(-1)
        held = np.flatnonzero(flat < self.num_tokens)
        places[flat[held]] = held
        firsts = np.cumsum(active) - active
        sent = [send(numbers, self.device) for numbers in (tokens, places, firsts, num_chunks)]
        return Chunks(size, sent[0], sent[1], tuple(active), sent[2], sent[3])

    def taps(self, kernel_size: int) -> Taps:
        """Return the inputs of a convolution over `kernel_size` tokens. Computed once for all layers of a step."""
        if kernel_size not in self._taps:
            keep = kernel_size - 1
            num_rows = len(self.lengths)
            inputs = np.empty((self.num_tokens, kernel_size), np.int64)
            last = np.empty((num_rows, keep), np.int64)
            for row, (start, length) in enumerate(zip(self.starts.tolist(), self.lengths.tolist(), strict=True)):
                # cached inputs, then the row's own
                places = np.r_[
                    row * keep : (row + 1) * keep, num_rows * keep + start : num_rows * keep + start + length
                ]
                inputs[start : start + length] = np.lib.stride_tricks.sliding_window_view(places, kernel_size)
                last[row] = places[length:]
            self._taps[kernel_size] = Taps(send(inputs, self.device), send(last, self.device))
        return self._taps[kernel_size]


class StateStep(NamedTuple):
    """The rows of one step: `num_decode` rows of one token each, then those of `ragged`.

    slots  int64 [num_decode], on the device
    """

    num_decode: int
    slots: torch.Tensor
    ragged: RaggedRows | None = None

    @classmethod
    def of(cls, plan: WirePlan, device: torch.device) -> StateStep:
        """Lay out a step, whose rows of one token come first."""
        num_decode = int((plan.num_new == 1).sum())
        slots = send(plan.state_slots[:num_decode], device)
        if num_decode == plan.num_rows:
            return cls(num_decode, slots)
        return cls(num_decode, slots, RaggedRows(plan.num_new[num_decode:], plan.state_slots[num_decode:], device))
