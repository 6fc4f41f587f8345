"""WirePlan: one step as arrays, the only thing that a runner and its attention kernel read.

It holds no sequence, request or tensor, so that it can be pickled or written into shared memory for a runner in another
process. Numbers stand for objects: `sequences` for sequences, `slot_maps` for lists of slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

ZERO = 0
"""The slot of the state before any token: all zeros, never written."""

SCRATCH = 1
"""The slot of the state of padding rows in CUDA graphs."""

RESERVED = 2
"""Slots of states that belong to no sequence: ZERO and SCRATCH."""


class Extent(NamedTuple):
    """Slots start, start + 1, ..., stop - 1."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


class Row(NamedTuple):
    """One sequence: tokens [past, past + num_new) of it are the step's queries [start, start + num_new).

    `extents`, (start, stop) of slots each, hold tokens [0, past + num_new), in order, and perhaps later ones.
    """

    start: int
    num_new: int
    past: int
    extents: Sequence[tuple[int, int]]

    @property
    def stop(self) -> int:
        return self.start + self.num_new

    @property
    def kv_len(self) -> int:
        return self.past + self.num_new


class EmbeddedRows(NamedTuple):
    """New tokens [start, stop) of a step that take the embeddings of an item from `first` on."""

    item: Any
    first: int
    start: int
    stop: int


class SharedPrefix(NamedTuple):
    """The first `length` tokens of `rows`, indices into the plan's rows, lie in the same slots."""

    length: int
    rows: tuple[int, ...]


def _no_numbers() -> NDArray[np.int64]:
    return np.empty(0, np.int64)


@dataclass(frozen=True, eq=False)
class WirePlan:
    """The rows of one forward pass. All arrays are int64 but `token_sources`.

    input_ids    [num_tokens]  all rows' new tokens, one row after the other; rows of one new token come first
    positions    [num_tokens]
    out_slots    [num_tokens]  where each new token's K and V are stored
    logits_rows  [num_logits]  the tokens whose logits are returned, in order
    num_new      [num_rows]    new tokens of each row
    past         [num_rows]    tokens of each row's sequence before them
    extents      [num_extents, 2]  slots of each row's tokens, in order, perhaps more than it has tokens
    extent_ptr   [num_rows + 1]  offsets of the rows in `extents`
    sequences    [num_rows]    the number of each row's sequence, the same in all steps
    slot_maps    [num_rows]    the number of each row's list of slots, which stands for the same extents in all steps:
                               kernels keep what they made of it; -1 where the extents are of this step only
    prefix_lens  [num_prefixes]  tokens of each prefix that several rows share
    prefix_rows  [any]         the rows that share each prefix, one prefix after the other
    prefix_ptr   [num_prefixes + 1]  offsets of the prefixes in `prefix_rows`
    token_sources  int32 [num_tokens]  the index of each input token among the tokens that the last step sampled, -1
                   where `input_ids` has it; None where it has all
    state_slots  [num_rows]    the slot of each row's state; empty for a model without layers with a state
    state_copies  [num_copies, 2]  states to copy before the step, at once: destination and source slot
    embedded     the new tokens that take embeddings of pictures and videos, whose ids are placeholders
    grid         [3, num_tokens]  positions of a multimodal rotary embedding; None where all three are `positions`
    until        [num_tokens]  the tokens of its row that each new token sees, at least those up to itself; None where
                 no token sees later ones
    until_windowed  whether that holds in layers with a window only
    """

    input_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    out_slots: NDArray[np.int64]
    logits_rows: NDArray[np.int64]
    num_new: NDArray[np.int64]
    past: NDArray[np.int64]
    extents: NDArray[np.int64]
    extent_ptr: NDArray[np.int64]
    sequences: NDArray[np.int64]
    slot_maps: NDArray[np.int64]
    prefix_lens: NDArray[np.int64] = field(default_factory=_no_numbers)
    prefix_rows: NDArray[np.int64] = field(default_factory=_no_numbers)
    prefix_ptr: NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, np.int64))
    token_sources: NDArray[np.int32] | None = None
    state_slots: NDArray[np.int64] = field(default_factory=_no_numbers)
    state_copies: NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 2), np.int64))
    embedded: tuple[EmbeddedRows, ...] = ()
    grid: NDArray[np.int64] | None = None
    until: NDArray[np.int64] | None = None
    until_windowed: bool = False

    @classmethod
    def of(
        cls,
        rows: Sequence[Row],
        input_ids: Sequence[int],
        logits_rows: Sequence[int],
        shared: Sequence[SharedPrefix] = (),
    ) -> WirePlan:
        """Build a plan from rows in the order of their queries. Its rows belong to no sequence."""
        positions = [np.arange(row.past, row.kv_len) for row in rows]
        slots = [slots_of(row.extents, row.past, row.kv_len) for row in rows]
        alone = np.full(len(rows), -1, np.int64)
        return cls(
            input_ids=np.array(input_ids, np.int64),
            positions=np.concatenate(positions),
            out_slots=np.concatenate(slots),
            logits_rows=np.array(logits_rows, np.int64),
            num_new=np.array([row.num_new for row in rows], np.int64),
            past=np.array([row.past for row in rows], np.int64),
            extents=np.array([extent for row in rows for extent in row.extents], np.int64).reshape(-1, 2),
            extent_ptr=indptr_of([len(row.extents) for row in rows]),
            sequences=alone,
            slot_maps=alone,
        ).sharing(shared)

    def sharing(self, shared: Sequence[SharedPrefix]) -> WirePlan:
        """Return the same step with these shared prefixes in place of its own."""
        return replace(
            self,
            prefix_lens=np.array([prefix.length for prefix in shared], np.int64),
            prefix_rows=np.array([row for prefix in shared for row in prefix.rows], np.int64),
            prefix_ptr=indptr_of([len(prefix.rows) for prefix in shared]),
        )

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_rows(self) -> int:
        return len(self.num_new)

    @property
    def is_decode(self) -> bool:
        """Return True if each row has one new token."""
        return len(self.num_new) == len(self.input_ids)

    @property
    def longest(self) -> int:
        """Return the most tokens of a row, new ones included."""
        return int((self.past + self.num_new).max())

    @cached_property
    def indices(self) -> NDArray[np.int64]:
        """Return the index of each new token in its sequence, which need not be its position. int64 [num_tokens]"""
        if self.is_decode:
            return self.past
        return np.repeat(self.past - self.ends + self.num_new, self.num_new) + np.arange(self.num_tokens)

    def sees(self, window: int | None) -> NDArray[np.int64] | None:
        """Return `until` for a layer with this window; None if none of its tokens sees a later one."""
        return None if self.until_windowed and window is None else self.until

    @cached_property
    def ends(self) -> NDArray[np.int64]:
        """Return the index after each row's last new token. int64 [num_rows]"""
        return np.cumsum(self.num_new)

    @cached_property
    def rows(self) -> list[Row]:
        """Return the rows one by one, for code that visits each of them."""
        extents, offsets = list(zip(*self.extents.T.tolist(), strict=True)), self.extent_ptr.tolist()
        of_rows = [extents[first:last] for first, last in zip(offsets, offsets[1:], strict=False)]
        return list(map(Row, (self.ends - self.num_new).tolist(), self.num_new.tolist(), self.past.tolist(), of_rows))

    @cached_property
    def shared(self) -> list[SharedPrefix]:
        """Return the shared prefixes one by one."""
        rows, offsets = self.prefix_rows.tolist(), self.prefix_ptr.tolist()
        return [
            SharedPrefix(length, tuple(rows[first:last]))
            for length, first, last in zip(self.prefix_lens.tolist(), offsets, offsets[1:], strict=False)
        ]

    def extents_of(self, index: int) -> list[list[int]]:
        """Return the extents of one row: [start, stop] of each."""
        found: list[list[int]] = self.extents[self.extent_ptr[index] : self.extent_ptr[index + 1]].tolist()
        return found


def indptr_of(lengths: Sequence[int]) -> NDArray[np.int64]:
    """Return the offsets of consecutive parts of these lengths. int64 [len(lengths) + 1]"""
    return np.cumsum([0, *lengths], dtype=np.int64)


def clip_range(extents: Iterable[tuple[int, int]], first: int, last: int) -> list[Extent]:
    """Return the slots of tokens [first, last) of a sequence that lives in `extents`, in order."""
    kept: list[Extent] = []
    offset = 0
    for start, stop in extents:
        low, high = max(first - offset, 0), min(last - offset, stop - start)
        if low < high:
            kept.append(Extent(start + low, start + high))
        offset += stop - start
    return kept


def slots_of(extents: Iterable[tuple[int, int]], first: int, last: int) -> NDArray[np.int64]:
    """Return the slots of tokens [first, last) of a sequence that lives in `extents`. int64 [last - first]"""
    pieces = [np.arange(start, stop, dtype=np.int64) for start, stop in clip_range(extents, first, last)]
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
