"""A step on the device: everything the kernels of all layers read, in buffers whose addresses never change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from graftlm.kernels.attention import Attention
from graftlm.kernels.gpu.attention.split_kv import Parts, cut, max_parts, num_items
from graftlm.kernels.transfer import copying_stream, send
from graftlm.kernels.wire_plan import SharedPrefix, WirePlan

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

    The rows are of up to `max_seqs` sequences (as many as rows, if not said), fewer where tokens are rows.

    table      int32 [max_seqs + 1, max_len]  slots of sequences, which keep their row for as long as they hold the
                                           same slots; the last row is that of padding
    rows       int32 [max_rows]            which table row each row has
    zeros      int32 [max_rows]            starts of rows that share nothing
    lens       int32 [max_rows]            tokens of each row, new ones included
    starts     int32 [max_rows]            tokens of each row that the shared prefix covers
    items, counts  int32                   the parts of the rows that decode (split_kv.py)
    indptr     int32 [max_rows + 1]        where each row's new tokens are
    members    int32 [max_rows]            rows that share the prefix
    slots      int32 [max_tokens]          where each new token's KV goes
    ids, positions  int32 [max_tokens]
    sources    int32 [max_tokens]          which of the tokens that the last step drew is this one; -1 takes `ids`
    num_members, prefix_len  int32 [1]

    Rows that pad a step up to a captured size have one token, in the scratch slot.

    num_splits  parts that so many rows of one length are cut into
    """

    def __init__(
        self,
        max_rows: int,
        max_tokens: int,
        max_len: int,
        scratch: int,
        device: torch.device,
        max_seqs: int | None = None,
        num_splits: Callable[[int], int] = lambda num_rows: 1,
    ) -> None:
        self.num_splits = num_splits
        self.max_seqs = max_rows if max_seqs is None else max_seqs
        self.max_rows, self.max_tokens, self.max_len, self.scratch = max_rows, max_tokens, max_len, scratch
        sizes = {
            "lens": max_rows, "rows": max_rows, "starts": max_rows, "members": max_rows, "indptr": max_rows + 1,
            "counts": max_rows, "items": max(num_items(n, num_splits(n)) for n in range(1, max_rows + 1)),
            "num_members": 1, "prefix_len": 1,
            "slots": max_tokens, "ids": max_tokens, "positions": max_tokens, "sources": max_tokens,
        }  # fmt: skip
        self._staging = [_Staging(sizes, device) for _ in range(2)]
        self._device = torch.zeros(sum(sizes.values()), dtype=torch.int32, device=device)
        offset = 0
        for name, size in sizes.items():
            setattr(self, name, self._device[offset : offset + size])
            offset += size
        self.table = torch.full((self.max_seqs + 1, max_len), scratch, dtype=torch.int32, device=device)
        self._table_rows: dict[int, int] = {}
        self._table_owners = [-1] * self.max_seqs
        self.zeros = torch.zeros(max_rows, dtype=torch.int32, device=device)

    lens: torch.Tensor
    rows: torch.Tensor
    starts: torch.Tensor
    members: torch.Tensor
    indptr: torch.Tensor
    items: torch.Tensor
    counts: torch.Tensor
    slots: torch.Tensor
    ids: torch.Tensor
    positions: torch.Tensor
    sources: torch.Tensor
    num_members: torch.Tensor
    prefix_len: torch.Tensor

    def write(self, plan: WirePlan, *, padded_rows: int = 0, token_rows: bool = False) -> Layout:
        """Send `plan`, padded with scratch rows up to `padded_rows`. The plan's decode rows must come first.

        token_rows  make a row of every new token: it sees those before it, which are stored before any is attended.
                    So a step of a few new tokens in some rows is a decode step, of more rows.
        """
        num_tokens, counts = plan.num_tokens, plan.num_new
        staging = self._next_staging()
        host = staging.views
        table_rows = self._assign_table_rows(plan)
        host["indptr"][0] = 0
        host["indptr"][1 : len(counts) + 1] = plan.ends
        host["slots"][:num_tokens] = plan.out_slots
        host["ids"][:num_tokens] = plan.input_ids
        host["positions"][:num_tokens] = plan.positions
        host["sources"][:num_tokens] = -1 if plan.token_sources is None else plan.token_sources
        if token_rows:
            num_rows = num_decode = num_tokens
            host["lens"][:num_rows] = plan.indices + 1
            host["rows"][:num_rows] = np.repeat(table_rows, counts)
        else:
            num_rows = len(counts)
            num_decode = int(np.argmax(counts > 1)) if (counts > 1).any() else num_rows
            host["lens"][:num_rows] = plan.past + counts
            host["rows"][:num_rows] = table_rows
        self._pad(host, num_rows, num_tokens, max(num_rows, padded_rows))
        queries = counts if token_rows else np.where(np.arange(num_rows) < num_decode, counts, 0)
        shared = best_prefix(plan, queries)
        host["starts"][: max(num_rows, padded_rows)] = 0
        host["num_members"][0] = host["prefix_len"][0] = 0
        if shared is not None:
            sharing = np.zeros(len(counts), np.bool_)
            sharing[list(shared.rows)] = True
            members = np.flatnonzero(np.repeat(sharing, counts) if token_rows else sharing[:num_decode])
            host["members"][: len(members)] = members
            host["starts"][members] = shared.length
            host["num_members"][0], host["prefix_len"][0] = len(members), shared.length
        self._cut(host, max(num_decode, padded_rows))
        staging.send(self._device)
        return Layout(num_rows, num_decode, 1 if token_rows else int(counts.max()), shared is not None)

    def fill_scratch(self, num_rows: int) -> None:
        """Hold a step of `num_rows` scratch rows, to capture a graph with."""
        staging = self._next_staging()
        host = staging.views
        self._pad(host, 0, 0, num_rows)
        host["starts"][:num_rows] = 0
        host["indptr"][: num_rows + 1] = np.arange(num_rows + 1)
        host["num_members"][0] = host["prefix_len"][0] = 0
        self._cut(host, num_rows)
        staging.send(self._device)

    def parts(self, num_rows: int) -> Parts:
        """How the step's first `num_rows` rows are cut: those that decode."""
        splits = self.num_splits(num_rows)
        return Parts(self.items[: num_items(num_rows, splits)], self.counts[:num_rows], max_parts(num_rows, splits))

    def _cut(self, host: dict[str, np.ndarray], num_rows: int) -> None:
        if num_rows:
            splits = self.num_splits(num_rows)
            lens = host["lens"][:num_rows] - host["starts"][:num_rows]
            cut(lens, splits, host["items"][: num_items(num_rows, splits)], host["counts"][:num_rows])

    def _pad(self, host: dict[str, np.ndarray], num_rows: int, num_tokens: int, size: int) -> None:
        """Make rows up to `size` of one token each, in the scratch slot."""
        if size > num_rows:
            tokens = slice(num_tokens, num_tokens + size - num_rows)
            host["lens"][num_rows:size], host["rows"][num_rows:size] = 1, self.max_seqs
            host["slots"][tokens], host["sources"][tokens] = self.scratch, -1
            host["ids"][tokens] = host["positions"][tokens] = 0

    def _next_staging(self) -> _Staging:
        """The buffer that was sent longer ago, free again."""
        self._staging.reverse()
        self._staging[0].wait()
        return self._staging[0]

    def _assign_table_rows(self, plan: WirePlan) -> np.ndarray:
        """Write the lists of slots that the table lacks. -> int32 [num_rows], each row's row of the table"""
        numbers = plan.slot_maps.tolist()
        table_rows = np.array([self._table_rows.get(number, -1) for number in numbers], np.int32)
        new = np.flatnonzero(table_rows < 0)
        if not len(new):
            return table_rows
        free = np.setdiff1d(np.arange(self.max_seqs), table_rows)
        pieces: list[tuple[int, int, int, int]] = []
        for index, table_row in zip(new.tolist(), free.tolist(), strict=False):
            self._table_rows.pop(self._table_owners[table_row], None)
            number = self._table_owners[table_row] = numbers[index]
            table_rows[index] = table_row
            if number >= 0:
                self._table_rows[number] = table_row
            column = 0
            for start, stop in plan.extents_of(index):
                count = min(stop - start, self.max_len - column)
                pieces.append((table_row, column, start, count))
                column += count
        from graftlm.kernels.gpu.attention.block_table import (  # where there is no Triton, there is no such step
            PIECE,
            write_table,
        )

        array = np.array(pieces, np.int32).reshape(-1, PIECE)
        write_table(self.table, send(array, self.table.device), int(array[:, 3].max()))
        return table_rows


class _Staging:
    """A step on the CPU, on its way to the device.

    It is copied there beside the step before, and taken from there by a kernel once that has ended: a copy from the CPU
    between two steps would take 25 us.
    """

    def __init__(self, sizes: dict[str, int], device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._host = torch.zeros(sum(sizes.values()), dtype=torch.int32, pin_memory=pinned)
        self._arrived = torch.empty_like(self._host, device=device) if pinned else None
        self._sent = torch.cuda.Event() if pinned else None
        self._taken = torch.cuda.Event() if pinned else None
        if self._taken is not None:
            self._taken.record(torch.cuda.current_stream(device))  # what had this memory before has ended
        host = self._host.numpy()
        offsets = np.cumsum([0, *sizes.values()]).tolist()
        self.views = {name: host[offset : offset + sizes[name]] for name, offset in zip(sizes, offsets, strict=False)}

    def send(self, device: torch.Tensor) -> None:
        if self._arrived is None or self._sent is None or self._taken is None:
            device.copy_(self._host)
            return
        from graftlm.kernels.gpu.step_inputs import copy_words

        computing, copying = torch.cuda.current_stream(device.device), copying_stream(device.device, "in")
        copying.wait_event(self._taken)
        with torch.cuda.stream(copying):
            self._arrived.copy_(self._host, non_blocking=True)
        self._sent.record(copying)
        computing.wait_event(self._sent)
        copy_words(self._arrived, device)
        self._taken.record(computing)

    def wait(self) -> None:
        """Wait until the device has read what was sent last."""
        if self._sent is not None:
            self._sent.synchronize()


@runtime_checkable
class CapturableAttention(Attention, Protocol):
    """An attention kernel whose steps come from buffers that a CUDA graph can be captured over."""

    device: torch.device
    strict: bool

    def num_splits(self, num_rows: int) -> int:
        """Parts that the tokens of `num_rows` rows of one length are cut into."""
        ...

    def bind(self, step: DeviceStep, layout: Layout) -> None:
        """Read steps from `step`, which holds one of this layout."""
        ...


def best_prefix(plan: WirePlan, num_queries: np.ndarray) -> SharedPrefix | None:
    """The shared prefix that saves decode rows the most reads, if enough to be worth its own pass.

    num_queries  int [num_rows]: how many queries of each row of the plan read it; 0 for rows that do not decode
    """

    def saved(prefix: SharedPrefix) -> int:
        return (int(num_queries[list(prefix.rows)].sum()) - 1) * prefix.length

    best = max(plan.shared, key=saved, default=None)
    return best if best is not None and saved(best) >= MIN_PREFIX_READS else None
