"""A step on the device: everything the kernels of all layers read, in buffers whose addresses never change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from graftlm.kernels.attention import Attention, Plan, Row, Shared
from graftlm.kernels.triton_table import PIECE, write_table

MIN_PREFIX_READS = 4096  # tokens whose reading a shared prefix must save to be worth its own pass


@dataclass(frozen=True)
class Layout:
    """What is where in a step that has been written to the device.

    num_rows    rows of the step; its first `num_decode` have one new token each, the others several
    max_new     the most new tokens of a row
    prefix      whether decode rows share a prefix that is read once
    """

    num_rows: int
    num_decode: int
    max_new: int
    prefix: bool


class DeviceStep:
    """Fixed buffers for a step of up to `max_rows` rows and `max_tokens` tokens, filled by one copy.

    table      int32 [max_rows, max_len]   each row's slots
    rows       int32 [max_rows]            0, 1, 2, ...: which table row each row has
    zeros      int32 [max_rows]            starts of rows that share nothing
    lens       int32 [max_rows]            tokens of each row, new ones included
    starts     int32 [max_rows]            tokens of each row that the shared prefix covers
    indptr     int32 [max_rows + 1]        where each row's new tokens are
    members    int32 [max_rows]            rows that share the prefix
    slots      int32 [max_tokens]          where each new token's KV goes
    ids, positions  int32 [max_tokens]
    num_members, prefix_len  int32 [1]

    Rows that pad a step up to a captured size have one token, in the scratch slot.
    """

    def __init__(self, max_rows: int, max_tokens: int, max_len: int, scratch: int, device: torch.device) -> None:
        self.max_rows, self.max_tokens, self.max_len, self.scratch = max_rows, max_tokens, max_len, scratch
        sizes = {
            "lens": max_rows, "starts": max_rows, "members": max_rows, "indptr": max_rows + 1,
            "slots": max_tokens, "ids": max_tokens, "positions": max_tokens, "num_members": 1, "prefix_len": 1,
        }  # fmt: skip
        total = sum(sizes.values())
        pinned = device.type == "cuda"
        self._host = torch.zeros(total, dtype=torch.int32, pin_memory=pinned)
        self._device = torch.zeros(total, dtype=torch.int32, device=device)
        self._views: dict[str, np.ndarray] = {}
        host = self._host.numpy()
        offset = 0
        for name, size in sizes.items():
            self._views[name] = host[offset : offset + size]
            setattr(self, name, self._device[offset : offset + size])
            offset += size
        self.table = torch.zeros(max_rows, max_len, dtype=torch.int32, device=device)
        self.rows = torch.arange(max_rows, dtype=torch.int32, device=device)
        self.zeros = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._pinned = pinned

    lens: torch.Tensor
    starts: torch.Tensor
    members: torch.Tensor
    indptr: torch.Tensor
    slots: torch.Tensor
    ids: torch.Tensor
    positions: torch.Tensor
    num_members: torch.Tensor
    prefix_len: torch.Tensor

    def write(self, plan: Plan, *, padded_rows: int = 0) -> Layout:
        """Send `plan`, padded with scratch rows up to `padded_rows`. The plan's decode rows must come first."""
        rows = plan.rows
        num_rows = len(rows)
        size = max(num_rows, padded_rows)
        num_tokens = rows[-1].start + rows[-1].num_new
        host = self._views
        counts = np.fromiter((row.num_new for row in rows), np.int32, num_rows)
        past = np.fromiter((row.past for row in rows), np.int32, num_rows)
        host["lens"][:num_rows] = past + counts
        host["lens"][num_rows:size] = 1
        host["starts"][:size] = 0
        host["indptr"][1 : num_rows + 1] = np.cumsum(counts)
        host["indptr"][0] = 0
        host["slots"][:num_tokens] = plan.out_slots.numpy()
        host["ids"][:num_tokens] = plan.input_ids.numpy()
        host["positions"][:num_tokens] = plan.positions.numpy()
        if size > num_rows:
            host["slots"][num_tokens : num_tokens + size - num_rows] = self.scratch
            host["ids"][num_tokens : num_tokens + size - num_rows] = 0
            host["positions"][num_tokens : num_tokens + size - num_rows] = 0
        num_decode = int(np.argmax(counts > 1)) if (counts > 1).any() else num_rows
        shared = best_prefix(plan.shared, num_decode)
        host["num_members"][0] = host["prefix_len"][0] = 0
        if shared is not None:
            members = np.asarray([row for row in shared.rows if row < num_decode], np.int32)
            host["members"][: len(members)] = members
            host["starts"][members] = shared.length
            host["num_members"][0], host["prefix_len"][0] = len(members), shared.length
        self._device.copy_(self._host, non_blocking=True)
        self._send_table(rows, size)
        return Layout(num_rows, num_decode, int(counts.max()), shared is not None)

    def fill_scratch(self, num_rows: int) -> None:
        """Hold a step of `num_rows` scratch rows, to capture a graph with."""
        host = self._views
        host["lens"][:num_rows] = 1
        host["starts"][:num_rows] = host["ids"][:num_rows] = host["positions"][:num_rows] = 0
        host["slots"][:num_rows] = self.scratch
        host["indptr"][: num_rows + 1] = np.arange(num_rows + 1)
        host["num_members"][0] = host["prefix_len"][0] = 0
        self._device.copy_(self._host)
        self._send_table([], num_rows)

    def _send_table(self, rows: Sequence[Row], size: int) -> None:
        pieces: list[tuple[int, int, int, int]] = []
        for index, row in enumerate(rows):
            column = 0
            for extent in row.extents:
                count = extent.stop - extent.start
                pieces.append((index, column, extent.start, count))
                column += count
        pieces.extend((index, 0, self.scratch, 1) for index in range(len(rows), size))
        array = np.asarray(pieces, np.int32).reshape(-1, PIECE)
        sent = torch.from_numpy(array)
        if self._pinned:
            sent = sent.pin_memory()
        write_table(self.table, sent.to(self.table.device, non_blocking=True), int(array[:, 3].max()))


@runtime_checkable
class CapturableAttention(Attention, Protocol):
    """An attention kernel whose steps come from buffers that a CUDA graph can be captured over."""

    device: torch.device

    def bind(self, step: DeviceStep, layout: Layout) -> None:
        """Read steps from `step`, which holds one of this layout."""
        ...


def best_prefix(shared: Sequence[Shared], num_decode: int) -> Shared | None:
    """The shared prefix that saves the first `num_decode` rows the most reads, if enough to be worth its own pass."""

    def saved(prefix: Shared) -> int:
        return (sum(row < num_decode for row in prefix.rows) - 1) * prefix.length

    best = max(shared, key=saved, default=None)
    return best if best is not None and saved(best) >= MIN_PREFIX_READS else None
