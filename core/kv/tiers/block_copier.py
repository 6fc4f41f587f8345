"""KV of a block of tokens as one row of bytes, and copies of such rows between a KV store and host memory."""

from __future__ import annotations

from collections import deque
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

BUFFERS = 8
"""Device buffers for each direction. A step that evicts more than all of them hold waits until one has been copied."""

STAGING_BYTES = 1 << 27
"""Bytes of each device buffer that copies pass through on a GPU, at most: eight take a large step's KV."""

STAGING_SHARE = 1 / 64
"""Share of a GPU's memory that all buffers take at most."""

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


class _Streams(NamedTuple):
    """For copies out of a buffer, for copies into one, and for the kernel that stores what is in it."""

    out: torch.cuda.Stream
    into: torch.cuda.Stream
    placing: torch.cuda.Stream


class Arrival:
    """Rows on their way from host memory to slots, copied concurrently with launched work."""

    def __init__(self, event: torch.cuda.Event | None) -> None:
        self._event = event

    def done(self) -> bool:
        """Return True once all tokens are in their slots."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        """Block until all tokens are in their slots."""
        if self._event is not None:
            self._event.synchronize()

    def order_before(self, stream: torch.cuda.Stream) -> None:
        """Let later launches on `stream` run after all tokens are in their slots."""
        if self._event is not None:
            stream.wait_event(self._event)


class BlockCopier:
    """Copies blocks between slots and rows in host memory.

    On a GPU both directions pass through device buffers, and each has a stream of its own for the copies between
    buffers and pinned host memory. Out: a kernel on the stream of the steps packs the tokens, in the order of the
    steps, so that no copy reads a slot before its step has written it. In: a kernel on a third stream stores the
    tokens, after all steps that are launched by then, so that no slot is written that an earlier step still reads. So
    no copy waits for the host once it has begun, however long the steps are. Buffers are taken in turn; events keep
    each until its bytes have left it.

    capacity  rows of a buffer: the most that one call takes
    """

    def __init__(self, parts: Sequence[torch.Tensor], layout: BlockLayout, staging_bytes: int = STAGING_BYTES) -> None:
        self.layout = layout
        self.device = parts[0].device
        self._parts = [part.view(_bits(part.dtype)) for part in parts]
        self._streams: _Streams | None = None
        if self.device.type == "cuda":
            memory = torch.cuda.get_device_properties(self.device).total_memory
            staging_bytes = min(staging_bytes, int(memory * STAGING_SHARE) // (2 * BUFFERS))
        self.capacity = max(1, min(staging_bytes // layout.num_bytes, MOST_ROWS))
        self._next = [0, 0]
        if self.device.type == "cuda":
            self._streams = _Streams(*(torch.cuda.Stream(self.device) for _ in range(3)))
            shape = (2, BUFFERS, self.capacity, layout.num_bytes)  # 2 directions
            self._buffers = torch.empty(shape, dtype=torch.uint8, device=self.device)
            self._free: list[list[torch.cuda.Event | None]] = [[None] * BUFFERS, [None] * BUFFERS]
            self._saving: deque[tuple[torch.cuda.Event, set[int]]] = deque()
            self._make_block_rows(parts)

    @property
    def room(self) -> int:
        """Rows that are saved without waiting for an earlier `save`."""
        if self._streams is None:
            return BUFFERS * self.capacity
        free = self._free[0][self._next[0] :] + self._free[0][: self._next[0]]
        busy = (i for i, event in enumerate(free) if event is not None and not event.query())
        return next(busy, BUFFERS) * self.capacity

    def save(self, runs: Sequence[Run], pieces: Sequence[torch.Tensor]) -> torch.cuda.Event | None:
        """Copy tokens out to rows of host memory, at most `capacity`; the slots may be written again by later launches.

        pieces  uint8 [num_rows, num_bytes] each, pinned for a GPU, together the rows of the runs in their order. They
                are complete once the returned event has passed
        """
        with torch.inference_mode():
            if self._streams is None:
                self._gather(runs, [self.layout.views(row[None]) for piece in pieces for row in piece])
                return None
            buffer, number = self._take_buffer(0)
            out, current = self._streams.out, torch.cuda.current_stream(self.device)
            if (free := self._free[0][number]) is not None:
                current.wait_event(free)
            copies = _beside(buffer, pieces)
            self._gather_by_index(runs, buffer)
            out.wait_event(current.record_event())
            with torch.cuda.stream(out):
                for piece, packed in copies:
                    piece.copy_(packed, non_blocking=True)
            done: torch.cuda.Event = out.record_event()
            self._free[0][number] = done
            self._forget_saved()
            self._saving.append((done, self._addresses(pieces)))
            return done

    def load(self, runs: Sequence[Run], pieces: Sequence[torch.Tensor]) -> Arrival:
        """Start to copy tokens of rows of host memory, at most `capacity`, to their slots. pieces: as for `save`

        The slots are written after all earlier launches; later ones may read them once they have arrived. The rows
        must not change before that.
        """
        with torch.inference_mode():
            if self._streams is None:
                self._scatter(runs, [self.layout.views(row[None]) for piece in pieces for row in piece])
                return Arrival(None)
            buffer, number = self._take_buffer(1)
            into, placing, launched = self._streams.into, self._streams.placing, torch.cuda.current_stream(self.device)
            self._await_saves(into, pieces)
            if (free := self._free[1][number]) is not None:
                into.wait_event(free)
            with torch.cuda.stream(into):
                for piece, packed in _beside(buffer, pieces):
                    packed.copy_(piece, non_blocking=True)
            placing.wait_event(into.record_event())
            placing.wait_event(launched.record_event())
            with torch.cuda.stream(placing):
                self._scatter_by_index(runs, buffer)
            done: torch.cuda.Event = placing.record_event()
            self._free[1][number] = done
            return Arrival(done)

    def synchronize(self) -> None:
        """Block until all copies have ended."""
        if self._streams is not None:
            for stream in self._streams:
                stream.synchronize()

    def _addresses(self, pieces: Sequence[torch.Tensor]) -> set[int]:
        """Return the addresses of rows of host memory."""
        return {piece.data_ptr() + i * self.layout.num_bytes for piece in pieces for i in range(len(piece))}

    def _await_saves(self, stream: torch.cuda.Stream, pieces: Sequence[torch.Tensor]) -> None:
        """Let later copies on `stream` wait for the saves of these rows that are under way."""
        self._forget_saved()
        read = self._addresses(pieces)
        last = next((event for event, saved in reversed(self._saving) if saved & read), None)
        if last is not None:
            stream.wait_event(last)

    def _forget_saved(self) -> None:
        while self._saving and self._saving[0][0].query():
            self._saving.popleft()

    def _take_buffer(self, direction: int) -> tuple[torch.Tensor, int]:
        number = self._next[direction]
        self._next[direction] = (number + 1) % BUFFERS
        return self._buffers[direction, number], number

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
        for view, part in self._slot_by_slot(rows):
            view[tokens[2], tokens[1]] = part[tokens[0]]
        if self._block_rows is not None:
            self._block_rows.gather(tokens, rows)

    def _scatter_by_index(self, runs: Sequence[Run], rows: torch.Tensor) -> None:
        tokens = self._tokens_of(runs)
        for view, part in self._slot_by_slot(rows):
            part.index_copy_(0, tokens[0], view[tokens[2], tokens[1]])
        if self._block_rows is not None:
            self._block_rows.scatter(tokens, rows)

    def _tokens_of(self, runs: Sequence[Run]) -> torch.Tensor:
        """Return slot, token in its row and row of each token. -> int64 [3, num_tokens], on the device"""
        slots = np.concatenate([np.arange(run.start, run.start + run.size) for run in runs])
        tokens = np.concatenate([np.arange(run.offset, run.offset + run.size) for run in runs])
        rows = np.repeat([run.row for run in runs], [run.size for run in runs])
        return send(np.stack([slots, tokens, rows]), self.device)

    def _slot_by_slot(self, rows: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the view of rows and the part of each tensor that no kernel copies."""
        left = range(len(self._parts)) if self._block_rows is None else self._block_rows.left
        views = self.layout.views(rows) if left else []
        return [(views[i], self._parts[i]) for i in left]


def _beside(buffer: torch.Tensor, pieces: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return each piece with its rows of a buffer, one after the other."""
    return list(zip(pieces, buffer[: sum(map(len, pieces))].split([len(piece) for piece in pieces]), strict=True))


def _bits(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to copy values of `dtype` in: not every operation takes numbers of one byte."""
    return torch.uint8 if dtype.itemsize == 1 else dtype
