"""StepPlan: the tensors of one forward, built with numpy and copied to the device once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from graftlm.core.pages import Extent, clip_range, coalesce
from graftlm.core.request import Sequence

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class PlanRow:
    """One sequence in one step: tokens [past, past + num_new) of it, at query rows [start, start + num_new).

    extents     slots of tokens [0, past + num_new), in order, neighbours joined.
    """

    sequence: Sequence
    start: int
    num_new: int
    past: int
    extents: tuple[Extent, ...]

    @property
    def stop(self) -> int:
        return self.start + self.num_new

    @property
    def kv_len(self) -> int:
        return self.past + self.num_new


@dataclass(frozen=True)
class SharedPrefix:
    """Rows whose first `length` tokens lie in the same slots, to be read once for all of them.

    `rows` are indices into StepPlan.rows, `extents` the slots of the shared tokens.
    """

    length: int
    extents: tuple[Extent, ...]
    rows: tuple[int, ...]


@dataclass(eq=False)
class StepPlan:
    """What one forward computes.

    input_ids    int64 [num_tokens]   all rows' new tokens, one after the other
    positions    int64 [num_tokens]
    out_slots    int64 [num_tokens]   where each new token's K and V go
    logits_rows  int64 [num_logits]   the query rows whose logits are wanted, in row order
    num_logits_per_row  for each PlanRow, how many of `logits_rows` are its own (0, 1, or more when scoring)
    kind         "decode" when every row has one new token, else "mixed"
    """

    rows: tuple[PlanRow, ...]
    input_ids: torch.Tensor
    positions: torch.Tensor
    out_slots: torch.Tensor
    logits_rows: torch.Tensor
    num_logits_per_row: tuple[int, ...]
    kind: Literal["decode", "mixed"]
    shared: tuple[SharedPrefix, ...] = field(default=())

    @property
    def num_tokens(self) -> int:
        return int(self.input_ids.shape[0])


@dataclass(frozen=True)
class ScheduledRow:
    """What the scheduler decided for one sequence: compute its next `num_new` tokens."""

    sequence: Sequence
    num_new: int
    num_logits: int


def slots_of(extents: Iterable[Extent], first: int, last: int) -> np.ndarray:
    """Slots of tokens [first, last) of a sequence that lives in `extents`. int64 [last - first]."""
    pieces = [np.arange(e.start, e.stop, dtype=np.int64) for e in clip_range(extents, first, last)]
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def build_plan(scheduled: list[ScheduledRow], *, share_decode: bool) -> StepPlan:
    """Lay out the rows of one step: those with one new token, then the others."""
    import torch

    rows: list[PlanRow] = []
    input_ids: list[int] = []
    positions: list[np.ndarray] = []
    out_slots: list[np.ndarray] = []
    logits_rows: list[int] = []
    start = 0
    scheduled = sorted(scheduled, key=lambda item: item.num_new > 1)  # kernels want the decode rows first
    for item in scheduled:
        sequence, num_new = item.sequence, item.num_new
        past = sequence.num_computed
        extents = tuple(clip_range(coalesce([*sequence.shared, *sequence.own]), 0, past + num_new))
        rows.append(PlanRow(sequence, start, num_new, past, extents))
        input_ids.extend(sequence.tokens[past : past + num_new])
        positions.append(np.arange(past, past + num_new, dtype=np.int64))
        out_slots.append(slots_of(extents, past, past + num_new))
        logits_rows.extend(range(start + num_new - item.num_logits, start + num_new))
        start += num_new
    decode = all(row.num_new == 1 for row in rows)
    return StepPlan(
        rows=tuple(rows),
        input_ids=torch.tensor(input_ids, dtype=torch.int64),
        positions=torch.from_numpy(np.concatenate(positions)),
        out_slots=torch.from_numpy(np.concatenate(out_slots)),
        logits_rows=torch.tensor(logits_rows, dtype=torch.int64),
        num_logits_per_row=tuple(item.num_logits for item in scheduled),
        kind="decode" if decode else "mixed",
        shared=find_shared(rows) if share_decode else (),
    )


def find_shared(rows: list[PlanRow], *, min_length: int = 64) -> tuple[SharedPrefix, ...]:
    """Partition rows so that the most KV reads are saved: (rows - 1) x shared tokens, summed over groups.

    Only locked radix prefixes of at least `min_length` tokens count. Rows that append forced tokens share as those
    with one new token do.
    """
    sharing = [i for i, row in enumerate(rows) if row.sequence.num_shared >= min_length]
    return tuple(_partition(rows, sharing, 0, min_length)[1])


def _partition(rows: list[PlanRow], members: list[int], offset: int, min_length: int) -> tuple[int, list[SharedPrefix]]:
    """The best grouping of rows that agree on their first `offset` tokens, and the reads that it saves."""
    by_slot: dict[int, list[int]] = {}
    for index in members:
        if rows[index].sequence.num_shared > offset:
            (slot, _), *_ = clip_range(rows[index].extents, offset, offset + 1)
            by_slot.setdefault(slot, []).append(index)
    saved = 0
    groups: list[SharedPrefix] = []
    for group in by_slot.values():
        if len(group) < 2:
            continue
        common = _common_length([rows[i] for i in group])
        whole = (len(group) - 1) * common if common >= min_length else 0
        split_saved, split_groups = _partition(rows, group, common, min_length)
        if split_saved > whole:
            saved, groups = saved + split_saved, groups + split_groups
        elif whole:
            prefix = SharedPrefix(common, tuple(clip_range(rows[group[0]].extents, 0, common)), tuple(group))
            saved, groups = saved + whole, [*groups, prefix]
    return saved, groups


def _common_length(rows: list[PlanRow]) -> int:
    """How many leading tokens of all `rows` lie in the same slots."""
    length = min(row.sequence.num_shared for row in rows)
    first = rows[0].extents
    for row in rows[1:]:
        common = 0
        for (a_start, a_stop), (b_start, b_stop) in zip(first, row.extents, strict=False):
            if a_start != b_start:
                break
            common += min(a_stop, b_stop) - a_start
            if a_stop != b_stop:
                break
        length = min(length, common)
    return length
