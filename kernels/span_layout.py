"""A step's plan as the layers of one kind see it: which spans of slots each query reads, and how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from graftlm.kernels.attention import Plan, Row, SlotRange

Span = tuple[int, int]
"""Slots first, ..., last - 1."""

_GATHER_TOKENS = 256
"""Longest span that is gathered with others into one padded call rather than read in place."""
_GATHER_BYTES = 1 << 20
"""Of K gathered at once: what stays in a core's cache."""
_MIN_FILL = 0.7
"""The least share of a padded call that is not padding."""
_SHORT_CHUNK = 32
"""Most new tokens of a row that are read with what comes before them, under a mask, in one call."""


@dataclass(frozen=True)
class Bundle:
    """Short spans of neighbouring decode rows, read by one call.

    slots    int64 [num_rows * width]: each span, filled up with its first slot
    bias     [num_rows, 1, 1, width], dtype of the queries: 0 for a token, -inf for filling; None if nothing is
    """

    num_rows: int
    width: int
    slots: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True)
class Level:
    """The j-th span of every decode row that has one. `index` into the decode rows; None: all of them, in order.

    A reading is a span that is read in place, or a bundle of several.
    """

    readings: list[Span | Bundle]
    num_rows: int
    index: torch.Tensor | None


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

    decode  where the queries of the rows with one new token are; None if every query is such a one.
    levels  their spans, without those of `groups`.
    chunks  rows of several new tokens.
    """

    decode: torch.Tensor | None
    levels: list[Level]
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


def bundled(spans: list[Span], bytes_per_slot: int, dtype: torch.dtype) -> list[Span | Bundle]:
    """`spans` in order, runs of short ones of like length joined into bundles."""
    readings: list[Span | Bundle] = []
    run: list[Span] = []
    longest = filled = 0
    for span in [*spans, (0, _GATHER_TOKENS + 1)]:
        length = span[1] - span[0]
        width = max(longest, length)
        count = len(run) + 1
        fits = (
            length <= _GATHER_TOKENS
            and width * count * bytes_per_slot <= _GATHER_BYTES
            and filled + length >= _MIN_FILL * width * count
        )
        if fits:
            run.append(span)
            longest, filled = width, filled + length
            continue
        readings += [_bundle(run, longest, dtype)] if len(run) > 1 else run
        if length <= _GATHER_TOKENS:
            run, longest, filled = [span], length, length
        else:
            readings.append(span)
            run, longest, filled = [], 0, 0
    return readings[:-1]


def _bundle(spans: list[Span], width: int, dtype: torch.dtype) -> Bundle:
    first = torch.tensor([span[0] for span in spans])[:, None]
    length = torch.tensor([span[1] - span[0] for span in spans])[:, None]
    column = torch.arange(width)[None]
    beyond = column >= length
    slots = torch.where(beyond, first, first + column).view(-1)
    bias = None
    if bool(beyond.any()):
        bias = torch.zeros(len(spans), 1, 1, width, dtype=dtype).masked_fill_(beyond[:, None, None], float("-inf"))
    return Bundle(len(spans), width, slots, bias)


def _chunk(row: Row, covered: int, one_call: bool, dtype: torch.dtype) -> Chunk:
    num_new = row.num_new
    if one_call and num_new <= _SHORT_CHUNK:
        spans = spans_of(row.extents, covered, row.past + num_new)
        length = spans[-1][1] - spans[-1][0]
        if length >= num_new:
            unseen = torch.ones(num_new, length, dtype=torch.bool).triu_(length - num_new + 1)
            return Chunk(
                row, covered, spans, torch.zeros(num_new, length, dtype=dtype).masked_fill_(unseen, -torch.inf)
            )
    return Chunk(row, covered, spans_of(row.extents, covered, row.past), None)


def lay_out(plan: Plan, window: int | None, bytes_per_slot: int | None, dtype: torch.dtype) -> Work:
    """Sort a step's rows into decode rows, chunks and groups for layers with this window.

    Short spans are bundled, and short chunks read in one call, if `bytes_per_slot` of K are given.
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
    singles = [(row, c) for row, c in zip(rows, covered, strict=True) if row.num_new == 1]
    one_call = bytes_per_slot is not None
    chunks = [_chunk(row, c, one_call, dtype) for row, c in zip(rows, covered, strict=True) if row.num_new > 1]
    spans_of_rows = [
        spans_of(row.extents, c if window is None else max(c, row.past + 1 - window), row.past + 1)
        for row, c in singles
    ]
    levels: list[Level] = []
    for depth in range(max(map(len, spans_of_rows), default=0)):
        having = [i for i, spans in enumerate(spans_of_rows) if len(spans) > depth]
        whole = len(having) == len(singles)
        index = None if whole else torch.tensor(having, device=plan.out_slots.device)
        spans = [spans_of_rows[i][depth] for i in having]
        readings: list[Span | Bundle] = list(spans) if bytes_per_slot is None else bundled(spans, bytes_per_slot, dtype)
        levels.append(Level(readings, len(spans), index))
    starts = torch.tensor([row.start for row, _ in singles], device=plan.out_slots.device)
    return Work(starts if chunks else None, levels, chunks, groups)
