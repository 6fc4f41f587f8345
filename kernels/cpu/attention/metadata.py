"""Attention metadata on a CPU: the spans of slots that each query of a step reads, and the path that reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from graftlm.kernels.cpu import MAX_RUN
from graftlm.kernels.wire_plan import Row, WirePlan, indptr_of

Span = tuple[int, int]
"""Slots first, ..., last - 1."""
Block = tuple[list[int], list[int], list[Span]]
"""A block of queries: their indices, the number of visible keys of each, and the spans."""

_MAX_SINGLE = 4
"""New tokens of a row up to which it runs as single queries, without a compiled loop for blocks."""
_MIN_BLOCK_FILL = 1 / 4
"""Share of a block below which a row runs as single queries, with a compiled loop for blocks."""
_TILE_QUERIES, _TILE_SPAN = 128, 256
"""Least queries, and least average keys of their spans, for which flash attention with AMX tiles, one call a span, is
faster than the compiled loop."""
_FEW_TILE_QUERIES, _FEW_TILE_SPAN, _MANY_TILE_KEYS = 32, 512, 1024
"""Further least values: flash attention is also faster for fewer queries over longer spans with many keys in all."""


@dataclass(frozen=True)
class DecodeQueries:
    """Single queries, each over its own spans, of which the last ends with the query's own token.

    query   int64 [n], indices of the step's queries
    indptr  int64 [n + 1], offsets of each query's spans
    spans   int64 [num_spans, 2], slots first, ..., last - 1; at least one for each query
    runs    int64 [num_runs + 1], offsets of runs: neighbouring queries of one row, each of which sees one key more than
            its predecessor. A run reads its keys together and has at most MAX_RUN queries.
    """

    query: NDArray[np.int64]
    indptr: NDArray[np.int64]
    spans: NDArray[np.int64]
    runs: NDArray[np.int64]

    @classmethod
    def of(cls, queries: Sequence[tuple[int, list[Span]]], runs: Sequence[int] | None = None) -> DecodeQueries:
        """Build from (query, its spans), in any order, and the lengths of runs; None makes each query its own run."""
        return cls(
            np.array([query for query, _ in queries], np.int64),
            indptr_of([len(spans) for _, spans in queries]),
            _spans([spans for _, spans in queries]),
            indptr_of([1] * len(queries) if runs is None else runs),
        )

    @cached_property
    def num_keys(self) -> int:
        """Return the number of keys over all queries."""
        return int((self.spans[:, 1] - self.spans[:, 0]).sum())

    @cached_property
    def addresses(self) -> tuple[int, int, int, int]:
        """Return the addresses of `query`, `indptr`, `spans` and `runs`."""
        a, b, c, d = (array.ctypes.data for array in (self.query, self.indptr, self.spans, self.runs))
        return a, b, c, d

    def each(self) -> list[tuple[int, list[Span]]]:
        """Return (query, its spans) of each query."""
        spans = [(first, last) for first, last in self.spans.tolist()]
        offsets = self.indptr.tolist()
        return [(q, spans[offsets[i] : offsets[i + 1]]) for i, q in enumerate(self.query.tolist())]


@dataclass(frozen=True)
class QueryBlocks:
    """Queries in blocks: all queries of a block attend to the same spans.

    query      int64 [num_queries], indices of the step's queries; query_ptr has the offsets of the blocks
    visible    int64 [num_queries], the number of the block's keys, from the first on, that each query sees; at least 1
    spans      int64 [num_spans, 2], slots first, ..., last - 1; span_ptr has the offsets of the blocks
    """

    query: NDArray[np.int64]
    visible: NDArray[np.int64]
    query_ptr: NDArray[np.int64]
    spans: NDArray[np.int64]
    span_ptr: NDArray[np.int64]

    @classmethod
    def of(cls, blocks: Sequence[Block]) -> QueryBlocks:
        return cls(
            np.array([q for queries, _, _ in blocks for q in queries], np.int64),
            np.array([n for _, visible, _ in blocks for n in visible], np.int64),
            indptr_of([len(queries) for queries, _, _ in blocks]),
            _spans([spans for _, _, spans in blocks]),
            indptr_of([len(spans) for _, _, spans in blocks]),
        )

    @classmethod
    def joined(cls, parts: Sequence[QueryBlocks]) -> QueryBlocks | None:
        """Concatenate the blocks of the parts; None if there are none."""
        if len(parts) <= 1:
            return parts[0] if parts else None
        query, visible, spans = (np.concatenate([getattr(x, n) for x in parts]) for n in ("query", "visible", "spans"))
        query_ptr, span_ptr = (
            indptr_of(np.concatenate([np.diff(getattr(x, name)) for x in parts]).tolist())
            for name in ("query_ptr", "span_ptr")
        )
        return cls(query, visible, query_ptr, spans, span_ptr)

    @cached_property
    def addresses(self) -> tuple[int, int, int, int, int]:
        """Return the addresses of `query`, `visible`, `query_ptr`, `spans` and `span_ptr`."""
        arrays = (self.query, self.visible, self.query_ptr, self.spans, self.span_ptr)
        a, b, c, d, e = (array.ctypes.data for array in arrays)
        return a, b, c, d, e


def _spans(of_each: Sequence[list[Span]]) -> NDArray[np.int64]:
    return np.array([span for spans in of_each for span in spans], np.int64).reshape(-1, 2)


@dataclass(frozen=True)
class SharedPrefix:
    """Spans that several rows share, read once for all queries of the rows.

    index   int64 [num_queries], indices of the step's queries
    blocks  the same queries in blocks; None without a compiled loop for blocks
    """

    spans: list[Span]
    index: torch.Tensor
    blocks: QueryBlocks | None


@dataclass(frozen=True)
class Chunk:
    """A row of several new tokens. `spans` hold the earlier tokens outside a shared prefix.

    until  the tokens of the row that each new one sees, for a row of which some see later ones; no prefix is shared
    """

    row: Row
    spans: list[Span]
    until: NDArray[np.int64] | None = None


@dataclass(frozen=True)
class AttentionMetadata:
    """The metadata of a plan for layers with one window size, or with none.

    singles   single queries, without the spans of `prefixes`
    decode    whether each row of the step has one new token
    blocks    rows of more new tokens, in blocks; None if there are none
    chunks    the remaining rows
    prefixes  the spans that several rows share
    """

    singles: DecodeQueries
    decode: bool
    blocks: QueryBlocks | None
    chunks: list[Chunk]
    prefixes: list[SharedPrefix]


def spans_of(extents: Sequence[Span], first: int, last: int) -> list[Span]:
    """Return the spans of slots that hold tokens [first, last) of a sequence."""
    spans: list[Span] = []
    offset = 0
    for start, stop in extents:
        low, high = max(first - offset, 0), min(last - offset, stop - start)
        if low < high:
            spans.append((start + low, start + high))
        offset += stop - start
    return spans


def _blocks(queries: list[int], visible: list[int], spans: list[Span], block_size: int) -> list[Block]:
    """Cut `queries` into blocks; the i-th sees the first visible[i] keys of the spans."""
    starts = range(0, len(queries), block_size)
    return [(queries[i : i + block_size], visible[i : i + block_size], spans) for i in starts]


def _fills_tiles(num_queries: int, num_keys: int, spans: Sequence[Span]) -> bool:
    """Return True if flash attention in AMX tiles is faster than the loop for `spans` with `num_keys` keys in all."""
    mean = sum(last - first for first, last in spans) / max(1, len(spans))
    if num_queries >= _TILE_QUERIES:
        return mean >= _TILE_SPAN or not spans
    return num_queries >= _FEW_TILE_QUERIES and num_keys >= _MANY_TILE_KEYS and mean >= _FEW_TILE_SPAN


def metadata_of(plan: WirePlan, window: int | None, tokens: Sequence[int]) -> AttentionMetadata:
    """Return a step's metadata for some tokens alone, as single queries: the i-th query is that of tokens[i]."""
    rows = {t: row for row in plan.rows for t in range(row.start, row.stop)}
    singles: list[tuple[int, list[Span]]] = []
    until = plan.sees(window)
    for query, token in enumerate(tokens):
        row = rows[token]
        own = row.past + token - row.start + 1
        seen = own if until is None else int(until[token])
        singles.append((query, spans_of(row.extents, 0 if window is None else max(0, own - window), seen)))
    return AttentionMetadata(DecodeQueries.of(singles), False, None, [], [])


def build_metadata(
    plan: WirePlan, window: int | None, block_size: int | None, device: torch.device, has_tiles: bool = False
) -> AttentionMetadata:
    """Sort a step's rows into single queries, blocks and chunks for layers with this window, and find shared prefixes.

    block_size  queries of a block; None if there is no compiled loop for blocks
    device      of the queries
    has_tiles   whether flash attention is faster than that loop for many queries
    """
    rows = plan.rows
    until = plan.sees(window)
    ahead = [until is not None and (until > plan.indices + 1)[row.start : row.stop].any() for row in rows]
    covered = [0] * len(rows)  # tokens of each row in a shared prefix
    prefixes: list[SharedPrefix] = []
    for shared in plan.shared:
        if window is not None and max(rows[i].kv_len for i in shared.rows) > window:
            continue  # part of the prefix is outside the window: each row reads its visible tokens separately
        if any(ahead[i] for i in shared.rows):
            continue
        for i in shared.rows:
            covered[i] = shared.length
        queries = [t for i in shared.rows for t in range(rows[i].start, rows[i].stop)]
        spans = spans_of(rows[shared.rows[0]].extents, 0, shared.length)
        blocks: list[Block] | None = None
        if block_size is not None and not (has_tiles and _fills_tiles(len(queries), shared.length, spans)):
            blocks = _blocks(queries, [shared.length] * len(queries), spans, block_size)
        index = torch.tensor(queries, device=device)
        prefixes.append(SharedPrefix(spans, index, QueryBlocks.of(blocks) if blocks is not None else None))
    max_single = _MAX_SINGLE if block_size is None else max(_MAX_SINGLE, int(block_size * _MIN_BLOCK_FILL))
    singles: list[tuple[int, list[Span]]] = []
    runs: list[int] = []
    chunks: list[Chunk] = []
    in_blocks: list[Block] = []
    for row, first_own, looks_ahead in zip(rows, covered, ahead, strict=True):
        length = row.kv_len
        if looks_ahead:
            assert until is not None
            seen_by = until[row.start : row.stop]
            if block_size is not None and (window is None or length <= window):
                spans = spans_of(row.extents, 0, length)
                in_blocks += _blocks(list(range(row.start, row.stop)), seen_by.tolist(), spans, block_size)
            else:
                chunks.append(Chunk(row, [], seen_by))
            continue
        before = spans_of(row.extents, first_own, row.past) if row.num_new > max_single else []
        if row.num_new <= max_single:
            for i in range(row.num_new):
                seen = row.past + i + 1
                first = first_own if window is None else max(first_own, seen - window)
                singles.append((row.start + i, spans_of(row.extents, first, seen)))
            nested = row.num_new <= MAX_RUN and (window is None or length <= first_own + window)
            runs += [row.num_new] if nested else [1] * row.num_new
        elif has_tiles and _fills_tiles(row.num_new, length - first_own, before):
            chunks.append(Chunk(row, before))
        elif block_size is not None and (window is None or length <= window):
            visible = list(range(row.past - first_own + 1, length - first_own + 1))
            spans = spans_of(row.extents, first_own, length)
            in_blocks += _blocks(list(range(row.start, row.stop)), visible, spans, block_size)
        else:
            chunks.append(Chunk(row, before))
    return AttentionMetadata(
        DecodeQueries.of(singles, runs),
        plan.is_decode,
        QueryBlocks.of(in_blocks) if in_blocks else None,
        chunks,
        prefixes,
    )
