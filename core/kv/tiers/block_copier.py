"""KV of a block of tokens as one row of bytes, and copies of such rows between a KV store and host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from graftlm.kernels.gpu.support import triton_problem
from graftlm.kernels.transfer import send

if TYPE_CHECKING:
    from graftlm.kernels.gpu.block_rows import BlockRows

ALIGNMENT = 64
"""Bytes to whose multiples the tensors of a row are aligned."""

STAGING_BYTES = 1 << 29
"""Bytes of each of the four device buffers that copies pass through on a GPU, at most: two take a large step's KV."""

STAGING_SHARE = 1 / 64
"""Share of a GPU's memory that the four take at most."""


MOST_ROWS = 256


class Run(NamedTuple):
    """Consecutive tokens of a block: `size` of them from token `offset` of row `row`, in slots from `start` on."""

    row: int
    offset: int
    start: int
    size: int


class BlockLayout:
    """Layout of a block in a row of bytes: the tensors of all layers, [block_tokens, ...] each, in order.

    parts      all that slots hold, [num_slots, ...] each: of a KV store, or of a pool of states (one token a block)
    num_bytes  of a row
    """

    def __init__(self, parts: Sequence[torch.Tensor], block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._parts = [(tuple(part.shape[1:]), part.dtype) for part in parts]
        self.offsets: list[int] = []
        self.num_bytes = 0
        for shape, dtype in self._parts:
            self.offsets.append(self.num_bytes)
            size = block_tokens * dtype.itemsize * int(torch.Size(shape).numel())
            self.num_bytes += -(-size // ALIGNMENT) * ALIGNMENT

    def __str__(self) -> str:
        """Name everything that gives the bytes their meaning."""
        parts = " ".join(f"{'x'.join(map(str, shape))}:{str(dtype)[6:]}" for shape, dtype in self._parts)
        return f"{self.block_tokens} tokens of {parts}"

    def views(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of rows, [num_rows, block_tokens, ...] each. rows: uint8 [num_rows, num_bytes]"""
        views = []
        for offset, (shape, dtype) in zip(self.offsets, self._parts, strict=True):
            full = (self.block_tokens, *shape)
            size = dtype.itemsize * int(torch.Size(full).numel())
            views.append(rows[:, offset : offset + size].view(_bits(dtype)).view(len(rows), *full))
        return views


class Arrival:
    """Rows on their way from host memory to the device, copied concurrently with launched work."""

    def __init__(self, rows: torch.Tensor, half: int, event: torch.cuda.Event | None) -> None:
        self.rows = rows
        self.half = half
        self._event = event

    def done(self) -> bool:
        """Return True once all bytes have arrived."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        """Block until all bytes have arrived."""
        if self._event is not None:
            self._event.synchronize()

    def order_before(self, stream: torch.cuda.Stream) -> None:
        """Let later launches on `stream` run after all bytes have arrived."""
        if self._event is not None:
            stream.wait_event(self._event)


class BlockCopier:
    """Copies blocks between slots and rows in host memory.

    On a GPU both directions pass through device buffers: kernels on the stream of the steps pack and unpack them, in
    the order of the steps, so that no copy can read a slot before its step has written it, nor write one that an
    earlier step still reads. The copies between buffers and pinned host memory run on one stream of their own, in the
    order of their calls. A buffer has two halves; events keep each half until its bytes have left it.

    capacity  rows of a half: the most that one call takes
    """

    def __init__(self, parts: Sequence[torch.Tensor], layout: BlockLayout, staging_bytes: int = STAGING_BYTES) -> None:
        self.layout = layout
        self.device = parts[0].device
        self._parts = [part.view(_bits(part.dtype)) for part in parts]
        self._stream: torch.cuda.Stream | None = None
        if self.device.type == "cuda":
            memory = torch.cuda.get_device_properties(self.device).total_memory
            staging_bytes = min(staging_bytes, int(memory * STAGING_SHARE) // 4)
        self.capacity = max(1, min(staging_bytes // layout.num_bytes, MOST_ROWS))
        self._halves = [0, 0]
        if self.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.device)
            shape = (2, 2, self.capacity, layout.num_bytes)  # direction, half
            self._buffers = torch.empty(shape, dtype=torch.uint8, device=self.device)
            self._free: list[list[torch.cuda.Event | None]] = [[None, None], [None, None]]
            self._make_block_rows(parts)

    @property
    def idle(self) -> bool:
        """Whether the next `save` starts without waiting for an earlier one."""
        if self._stream is None:
            return True
        event = self._free[0][self._halves[0]]
        return event is None or bool(event.query())

    def save(self, runs: Sequence[Run], rows: Sequence[torch.Tensor]) -> torch.cuda.Event | None:
        """Copy tokens out to rows of host memory, at most `capacity`; the slots may be written again by later launches.

        rows  uint8 [num_bytes] each, pinned for a GPU. They are complete once the returned event has passed
        """
        with torch.inference_mode():
            if self._stream is None:
                self._gather(runs, [self.layout.views(row[None]) for row in rows])
                return None
            buffer, half = self._half(0)
            current = torch.cuda.current_stream(self.device)
            if (free := self._free[0][half]) is not None:
                current.wait_event(free)
            self._gather_by_index(runs, buffer[: len(rows)])
            self._stream.wait_event(current.record_event())
            with torch.cuda.stream(self._stream):
                for index, row in enumerate(rows):
                    row.copy_(buffer[index], non_blocking=True)
            done: torch.cuda.Event = self._stream.record_event()
            self._free[0][half] = done
            return done

    def fetch(self, rows: Sequence[torch.Tensor]) -> Arrival:
        """Start to copy rows of host memory to the device, at most `capacity`. `load` takes what has arrived."""
        if self._stream is None:
            return Arrival(torch.empty(0), 0, None)
        buffer, half = self._half(1)
        with torch.inference_mode():
            if (free := self._free[1][half]) is not None:
                self._stream.wait_event(free)
            with torch.cuda.stream(self._stream):
                for index, row in enumerate(rows):
                    buffer[index].copy_(row, non_blocking=True)
            return Arrival(buffer[: len(rows)], half, self._stream.record_event())

    def load(self, runs: Sequence[Run], rows: Sequence[torch.Tensor], arrival: Arrival) -> None:
        """Store the tokens of fetched rows in their slots, after all earlier launches and before all later ones."""
        with torch.inference_mode():
            if self._stream is None:
                self._scatter(runs, [self.layout.views(row[None]) for row in rows])
                return
            current = torch.cuda.current_stream(self.device)
            arrival.order_before(current)
            self._scatter_by_index(runs, arrival.rows)
            self._free[1][arrival.half] = current.record_event()

    def synchronize(self) -> None:
        """Block until all copies have ended."""
        if self._stream is not None:
            self._stream.synchronize()

    def _half(self, direction: int) -> tuple[torch.Tensor, int]:
        half = self._halves[direction]
        self._halves[direction] = 1 - half
        return self._buffers[direction, half], half

    def _gather(self, runs: Sequence[Run], views: Sequence[Sequence[torch.Tensor]]) -> None:
        for row, offset, start, size in runs:
            for view, part in zip(views[row], self._parts, strict=True):
                view[0, offset : offset + size].copy_(part[start : start + size])

    def _scatter(self, runs: Sequence[Run], views: Sequence[Sequence[torch.Tensor]]) -> None:
        for row, offset, start, size in runs:
            for view, part in zip(views[row], self._parts, strict=True):
                part[start : start + size].copy_(view[0, offset : offset + size])

    def _make_block_rows(self, parts: Sequence[torch.Tensor]) -> None:
        """Prepare the kernel that copies all layers at once, and compile it, where Triton runs."""
        self._block_rows: BlockRows | None = None
        if triton_problem(self.device) is None:
            from graftlm.kernels.gpu.block_rows import BlockRows

            self._block_rows = BlockRows(parts, self.layout.offsets)
            first = torch.zeros(3, 1, dtype=torch.int64, device=self.device)
            self._block_rows.gather(first, self._buffers[1, 0])
            self._block_rows.scatter(first, self._buffers[1, 0])

    def _gather_by_index(self, runs: Sequence[Run], rows: torch.Tensor) -> None:
        tokens = self._tokens_of(runs)
        for view, part in self._slot_by_slot(self.layout.views(rows)):
            view[tokens[2], tokens[1]] = part[tokens[0]]
        if self._block_rows is not None:
            self._block_rows.gather(tokens, rows)

    def _scatter_by_index(self, runs: Sequence[Run], rows: torch.Tensor) -> None:
        tokens = self._tokens_of(runs)
        for view, part in self._slot_by_slot(self.layout.views(rows)):
            part.index_copy_(0, tokens[0], view[tokens[2], tokens[1]])
        if self._block_rows is not None:
            self._block_rows.scatter(tokens, rows)

    def _tokens_of(self, runs: Sequence[Run]) -> torch.Tensor:
        """Return slot, token in its row and row of each token. -> int64 [3, num_tokens], on the device"""
        slots = np.concatenate([np.arange(run.start, run.start + run.size) for run in runs])
        tokens = np.concatenate([np.arange(run.offset, run.offset + run.size) for run in runs])
        rows = np.repeat([run.row for run in runs], [run.size for run in runs])
        return send(np.stack([slots, tokens, rows]), self.device)

    def _slot_by_slot(self, views: list[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the view and the part of each tensor that no kernel copies."""
        left = range(len(views)) if self._block_rows is None else self._block_rows.left
        return [(views[i], self._parts[i]) for i in left]


def _bits(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to copy values of `dtype` in: not every operation takes numbers of one byte."""
    return torch.uint8 if dtype.itemsize == 1 else dtype
