"""A step's plan as the layers of one kind see it: which spans of slots each query reads, and how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from graftlm.kernels.attention import Plan, Row, SlotRange

Span = tuple[int, int]
"""Slots first, ..., last - 1."""
BlockOf = tuple[list[int], list[int], list[Span]]
"""Queries, how many keys of the spans each sees, and the spans."""

_FEW = 4
"""Most new tokens of a row that are read as single queries, each with all that it sees."""
MAX_RUN = 16
"""Most single queries that go over their keys together."""
_FEW_OF_BLOCK = 16 / 64
"""The same where blocks of queries are read together: what part of a full one is not worth the place of a block."""


@dataclass(frozen=True)
class Reads:
    """Queries that are read one by one, each over its own spans. At least one span each; the last ends with its token.

    query   int64 [n], which of the step's queries
    indptr  int64 [n + 1], where each one's spans begin
    spans   int64 [num_spans, 2], slots first, ..., last - 1
    runs    int64 [num_runs + 1], where each run of neighbours begins whose keys are those of the one before and one
            more: they go over them together. No run is longer than MAX_RUN.
    """

    query: NDArray[np.int64]
    indptr: NDArray[np.int64]
    spans: NDArray[np.int64]
    runs: NDArray[np.int64]

    @classmethod
    def of(cls, queries: Sequence[tuple[int, list[Span]]], runs: Sequence[int] | None = None) -> Reads:
        """Of (query, its spans), in any order, and the lengths of the runs; without them each query is its own."""
        lengths = [len(spans) for _, spans in queries]
        return cls(
            np.array([query for query, _ in queries], np.int64),
            np.cumsum([0, *lengths], dtype=np.int64),
            np.array([span for _, spans in queries for span in spans], np.int64).reshape(-1, 2),
            np.arange(len(queries) + 1) if runs is None else np.cumsum([0, *runs], dtype=np.int64),
        )

    @cached_property
    def num_keys(self) -> int:
        """Keys that are read, over all queries."""
        return int((self.spans[:, 1] - self.spans[:, 0]).sum())

    @cached_property
    def addresses(self) -> tuple[int, int, int, int]:
        """Of `query`, `indptr`, `spans` and `runs`."""
        a, b, c, d = (array.ctypes.data for array in (self.query, self.indptr, self.spans, self.runs))
        return a, b, c, d

    def each(self) -> list[tuple[int, list[Span]]]:
        """(query, its spans) of each."""
        spans = [(first, last) for first, last in self.spans.tolist()]
        ends = self.indptr.tolist()
        return [(q, spans[ends[i] : ends[i + 1]]) for i, q in enumerate(self.query.tolist())]


@dataclass(frozen=True)
class Blocks:
    """Queries that are read together, in blocks over the same spans.

    query      int64 [num_queries], which of the step's queries; those of block b from query_ptr[b] on
    visible    int64 [num_queries], how many of the block's keys, from the first, each query sees; at least one
    spans      int64 [num_spans, 2], slots first, ..., last - 1; those of block b from span_ptr[b] on
    """

    query: NDArray[np.int64]
    visible: NDArray[np.int64]
    query_ptr: NDArray[np.int64]
    spans: NDArray[np.int64]
    span_ptr: NDArray[np.int64]

    @classmethod
    def of(cls, blocks: Sequence[BlockOf]) -> Blocks:
        """Of (queries, what each sees, spans)."""
        return cls(
            np.array([q for queries, _, _ in blocks for q in queries], np.int64),
            np.array([n for _, visible, _ in blocks for n in visible], np.int64),
            np.cumsum([0, *(len(queries) for queries, _, _ in blocks)], dtype=np.int64),
            np.array([span for _, _, spans in blocks for span in spans], np.int64).reshape(-1, 2),
            np.cumsum([0, *(len(spans) for _, _, spans in blocks)], dtype=np.int64),
        )

    @cached_property
    def addresses(self) -> tuple[int, int, int, int, int]:
        """Of `query`, `visible`, `query_ptr`, `spans` and `span_ptr`."""
        arrays = (self.query, self.visible, self.query_ptr, self.spans, self.span_ptr)
        a, b, c, d, e = (array.ctypes.data for array in arrays)
        return a, b, c, d, e


@dataclass(frozen=True)
class Group:
    """Queries that share `spans`, to be read once for all of them. `index` into the step's queries; also as blocks."""

    spans: list[Span]
    index: torch.Tensor
    blocks: Blocks | None


@dataclass(frozen=True)
class Chunk:
    """A row of several new tokens. `spans`: where the tokens before them lie, without those that a group covers."""

    row: Row
    spans: list[Span]


@dataclass(frozen=True)
class Work:
    """A plan as one kind of layer sees it: without a window, or with a window of one size.

    singles  queries that are read one by one, without the spans of `groups`
    decode   whether these are all queries of the step, one of each row
    blocks   rows of more new tokens that are read in blocks; None if none are
    chunks   the others
    """

    singles: Reads
    decode: bool
    blocks: Blocks | None
    chunks: list[Chunk]
    groups: list[Group]


def spans_of(extents: Sequence[SlotRange], first: int, last: int) -> list[Span]:
    """Where tokens [first, last) of a sequence lie."""
    spans: list[Span] = []
    offset = 0
    for extent in extents:
        start, stop = extent.start, extent.stop
        low, high = max(first - offset, 0), min(last - offset, stop - start)
        if low < high:
            spans.append((start + low, start + high))
        offset += stop - start
    return spans


def _blocks(queries: list[int], visible: list[int], spans: list[Span], width: int) -> list[BlockOf]:
    """`queries` in blocks of `width`; visible[i] of the spans' keys are seen by the i-th."""
    starts = range(0, len(queries), width)
    return [(queries[i : i + width], visible[i : i + width], spans) for i in starts]


def lay_out(plan: Plan, window: int | None, block: int | None, device: torch.device) -> Work:
    """Sort a step's rows into single queries, chunks and groups for layers with this window.

    block   how many queries of a chunk or group are read together; None if they are not read in blocks
    device  where the queries are
    """
    rows = plan.rows
    covered = [0] * len(rows)
    groups: list[Group] = []
    for shared in plan.shared:
        if window is not None and max(rows[i].past + rows[i].num_new for i in shared.rows) > window:
            continue  # these rows no longer see all of it: each reads what it sees by itself
        for i in shared.rows:
            covered[i] = shared.length
        queries = [t for i in shared.rows for t in range(rows[i].start, rows[i].start + rows[i].num_new)]
        spans = spans_of(shared.extents, 0, shared.length)
        together = None if block is None else Blocks.of(_blocks(queries, [shared.length] * len(queries), spans, block))
        groups.append(Group(spans, torch.tensor(queries, device=device), together))
    few = _FEW if block is None else max(_FEW, int(block * _FEW_OF_BLOCK))
    singles: list[tuple[int, list[Span]]] = []
    runs: list[int] = []
    chunks: list[Chunk] = []
    blocks: list[BlockOf] = []
    for row, hidden in zip(rows, covered, strict=True):
        length = row.past + row.num_new
        if row.num_new <= few:
            for i in range(row.num_new):
                seen = row.past + i + 1
                first = hidden if window is None else max(hidden, seen - window)
                singles.append((row.start + i, spans_of(row.extents, first, seen)))
            nested = row.num_new <= MAX_RUN and (window is None or length <= hidden + window)
            runs += [row.num_new] if nested else [1] * row.num_new
        elif block is not None and (window is None or length <= window):
            visible = list(range(row.past - hidden + 1, length - hidden + 1))
            spans = spans_of(row.extents, hidden, length)
            blocks += _blocks(list(range(row.start, row.start + row.num_new)), visible, spans, block)
        else:
            chunks.append(Chunk(row, spans_of(row.extents, hidden, row.past)))
    decode = all(row.num_new == 1 for row in rows)
    return Work(Reads.of(singles, runs), decode, Blocks.of(blocks) if blocks else None, chunks, groups)
