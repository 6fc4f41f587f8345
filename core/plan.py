"""StepPlan: the tensors of one forward, built with numpy and copied to the device once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from graftlm.core.pages import Extent, coalesce
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
    """Decode rows whose first `length` tokens lie in the same slots, to be read once for all of them.

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


def slots_of(extents: tuple[Extent, ...], first: int, last: int) -> np.ndarray:
    """Slots of tokens [first, last) of a sequence that lives in `extents`. int64 [last - first]."""
    pieces: list[np.ndarray] = []
    offset = 0
    for start, stop in extents:
        low, high = max(first - offset, 0), min(last - offset, stop - start)
        if low < high:
            pieces.append(np.arange(start + low, start + high, dtype=np.int64))
        offset += stop - start
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def clip(extents: list[Extent], length: int) -> tuple[Extent, ...]:
    """The first `length` slots of `extents`."""
    kept: list[Extent] = []
    for start, stop in extents:
        if length <= 0:
            break
        kept.append(Extent(start, min(stop, start + length)))
        length -= stop - start
    return tuple(kept)


def build_plan(scheduled: list[ScheduledRow], *, share_decode: bool) -> StepPlan:
    """Lay out the rows of one step."""
    import torch

    rows: list[PlanRow] = []
    input_ids: list[int] = []
    positions: list[np.ndarray] = []
    out_slots: list[np.ndarray] = []
    logits_rows: list[int] = []
    start = 0
    for item in scheduled:
        sequence, num_new = item.sequence, item.num_new
        past = sequence.num_computed
        extents = clip(coalesce([*sequence.shared, *sequence.own]), past + num_new)
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
    """Group decode rows by the locked radix prefix they share; the longest worthwhile one wins.

    Two rows share exactly the leading extents that are equal; rows are grouped by their first extent's start.
    """
    by_first: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        if row.num_new == 1 and row.sequence.num_shared >= min_length:
            by_first.setdefault(row.extents[0].start, []).append(index)
    groups: list[SharedPrefix] = []
    for members in by_first.values():
        if len(members) < 2:
            continue
        common = _common_length([rows[i] for i in members])
        if common >= min_length:
            groups.append(SharedPrefix(common, clip(list(rows[members[0]].extents), common), tuple(members)))
    return tuple(groups)


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
