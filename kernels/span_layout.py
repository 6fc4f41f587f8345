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

_FEW = 4
"""Most new tokens of a row that are read as single queries, each with all that it sees."""
_SHORT_CHUNK = 32
"""Most new tokens of a row that are read with what comes before them, under a mask, in one call."""


@dataclass(frozen=True)
class Reads:
    """Queries that are read one by one, each over its own spans. At least one span each; the last ends with its token.

    query   int64 [n], which of the step's queries
    indptr  int64 [n + 1], where each one's spans begin
    spans   int64 [num_spans, 2], slots first, ..., last - 1
    """

    query: NDArray[np.int64]
    indptr: NDArray[np.int64]
    spans: NDArray[np.int64]

    @classmethod
    def of(cls, queries: Sequence[tuple[int, list[Span]]]) -> Reads:
        """Of (query, its spans), in any order."""
        lengths = [len(spans) for _, spans in queries]
        return cls(
            np.array([query for query, _ in queries], np.int64),
            np.cumsum([0, *lengths], dtype=np.int64),
            np.array([span for _, spans in queries for span in spans], np.int64).reshape(-1, 2),
        )

    @cached_property
    def num_keys(self) -> int:
        """Keys that are read, over all queries."""
        return int((self.spans[:, 1] - self.spans[:, 0]).sum())

    @cached_property
    def addresses(self) -> tuple[int, int, int]:
        """Of `query`, `indptr` and `spans`."""
        return self.query.ctypes.data, self.indptr.ctypes.data, self.spans.ctypes.data

    def each(self) -> list[tuple[int, list[Span]]]:
        """(query, its spans) of each."""
        spans = [(first, last) for first, last in self.spans.tolist()]
        ends = self.indptr.tolist()
        return [(q, spans[ends[i] : ends[i + 1]]) for i, q in enumerate(self.query.tolist())]


@dataclass(frozen=True)
class Group:
    """Queries that share `spans`, to be read once for all of them. `index` into the step's queries."""

    spans: list[Span]
    index: torch.Tensor


@dataclass(frozen=True)
class Chunk:
    """A row of several new tokens.

    covered  how many of its tokens a group already covers
    spans    where the others lie: all of them if there is a `bias`, else those before the new ones
    bias     [num_new, length of the last span], dtype of the queries: 0 where a query sees a key, else -inf; set if
             the new tokens are few and lie in one span
    """

    row: Row
    covered: int
    spans: list[Span]
    bias: torch.Tensor | None


@dataclass(frozen=True)
class Work:
    """A plan as one kind of layer sees it: without a window, or with a window of one size.

    singles  queries that are read one by one, without the spans of `groups`
    decode   whether these are all queries of the step, one of each row
    chunks   rows of more new tokens
    """

    singles: Reads
    decode: bool
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


def _chunk(row: Row, covered: int, masked: bool, dtype: torch.dtype) -> Chunk:
    num_new = row.num_new
    if masked and num_new <= _SHORT_CHUNK:
        spans = spans_of(row.extents, covered, row.past + num_new)
        length = spans[-1][1] - spans[-1][0]
        if length >= num_new:
            unseen = torch.ones(num_new, length, dtype=torch.bool).triu_(length - num_new + 1)
            bias = torch.zeros(num_new, length, dtype=dtype).masked_fill_(unseen, -torch.inf)
            return Chunk(row, covered, spans, bias)
    return Chunk(row, covered, spans_of(row.extents, covered, row.past), None)


def lay_out(plan: Plan, window: int | None, masked: bool, dtype: torch.dtype) -> Work:
    """Sort a step's rows into single queries, chunks and groups for layers with this window.

    With `masked`, short chunks are read in one call under a mask.
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
        groups.append(Group(spans, torch.tensor(queries, device=plan.out_slots.device)))
    singles: list[tuple[int, list[Span]]] = []
    chunks: list[Chunk] = []
    for row, hidden in zip(rows, covered, strict=True):
        if row.num_new > _FEW:
            chunks.append(_chunk(row, hidden, masked, dtype))
            continue
        for i in range(row.num_new):
            seen = row.past + i + 1
            first = hidden if window is None else max(hidden, seen - window)
            singles.append((row.start + i, spans_of(row.extents, first, seen)))
    return Work(Reads.of(singles), all(row.num_new == 1 for row in rows), chunks, groups)
