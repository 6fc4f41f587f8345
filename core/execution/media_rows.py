"""MediaRows: what a step's plan has beside text: embeddings of pictures, positions of their own, who sees whom."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from graftlm.core.prompt_input import PromptInput
from graftlm.kernels.wire_plan import EmbeddedRows, WirePlan

if TYPE_CHECKING:
    from numpy.typing import NDArray

PLACEHOLDER = 0
"""Stands for a picture's token in `WirePlan.input_ids`."""


class MediaRows:
    """Collects the rows of prompts with pictures or modules while a step is laid out."""

    def __init__(self) -> None:
        self._embedded: list[EmbeddedRows] = []
        self._grids: list[tuple[int, NDArray[np.int64]]] = []  # first token in the step, and its positions [3, n]
        self._until: list[tuple[int, int, int]] = []  # tokens [start, stop) of the step see so many of their row
        self._windowed = False

    def add_one(self, prompt: PromptInput, token_id: int, past: int, start: int) -> tuple[int, int]:
        """Add a row of one token, with index `start` in the step. -> its id and position in the plan"""
        if token_id < 0:
            ids, positions = self.add(prompt, np.array([token_id], np.int64), past, start)
            return int(ids[0]), int(positions[0])
        return token_id, past if prompt.layout is None else prompt.layout.position(past)

    def add(
        self, prompt: PromptInput, ids: NDArray[np.integer], past: int, start: int
    ) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
        """Add a row of the tokens `ids`, which are [past, past + n) of its sequence and [start, start + n) of the step.

        -> their ids and positions in the plan
        """
        stop = past + len(ids)
        layout = prompt.layout
        spans = prompt.spans
        for i in range(bisect_right(spans, past, key=lambda span: span.stop), len(spans)):
            span = spans[i]
            low, high = max(span.start, past), min(span.stop, stop)
            if low >= high:
                break
            item, first = span.values
            here = start - past
            self._embedded.append(EmbeddedRows(item, first + low - span.start, here + low, here + high))
            if layout is not None and layout.both_ways:
                self._until.append((here + low, here + high, span.stop))
                self._windowed |= layout.both_ways == "windowed"
        positions = np.arange(past, stop)
        if layout is not None:
            positions += layout.delta
            if layout.positions is not None and past < layout.positions.shape[1]:
                part = layout.positions[:, past:stop]
                positions[: part.shape[1]] = part[0]
                self._grids.append((start, part))
        return np.where(ids < 0, PLACEHOLDER, ids), positions

    def written(self, wire: WirePlan) -> WirePlan:
        """Return the step with what was collected."""
        if not self._embedded:
            return wire
        grid = until = None
        if self._grids:
            grid = np.repeat(wire.positions[None], 3, 0)
            for start, part in self._grids:
                grid[:, start : start + part.shape[1]] = part
        if self._until:
            until = wire.indices + 1
            for start, stop, seen in self._until:
                until[start:stop] = seen
        return replace(wire, embedded=tuple(self._embedded), grid=grid, until=until, until_windowed=self._windowed)
