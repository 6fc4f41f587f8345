"""StepPlan: the tensors of one forward, built with numpy and copied to the device once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from graftlm.core.kv.pages import Extent, clip_range, coalesce
from graftlm.core.sequence import Sequence

if TYPE_CHECKING:
    import torch


class PlanRow(NamedTuple):
    """One sequence in one step: tokens [past, past + num_new) of it, at query rows [start, start + num_new).

    extents     slots of tokens [0, past + num_new) and perhaps of later ones, in order, neighbours joined.
    slot_map     all slots of the sequence, the same object for as long as they stay the same
    drafts      the last of the new tokens, which are guesses: the sequence does not have them yet
    """

    sequence: Sequence
    start: int
    num_new: int
    past: int
    extents: tuple[Extent, ...]
    slot_map: SlotMap | None = None
    drafts: tuple[int, ...] = ()

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
    """The rows and tensors of one forward pass.

    input_ids    int64 [num_tokens]   all rows' new tokens, one after the other
    positions    int64 [num_tokens]
    out_slots    int64 [num_tokens]   where each new token's K and V go
    logits_rows  int64 [num_logits]   the query rows whose logits are wanted, in row order
    num_logits_per_row  for each PlanRow, how many of `logits_rows` are its own (0, 1, or more when scoring)
    kind         "decode" when every row has one new token, else "mixed"
    token_sources  int32 [num_tokens]: which of the tokens that the last step sampled is this token, -1 for an id that
                 the host knows; None where it knows all
    """

    rows: tuple[PlanRow, ...]
    input_ids: torch.Tensor
    positions: torch.Tensor
    out_slots: torch.Tensor
    logits_rows: torch.Tensor
    num_logits_per_row: tuple[int, ...]
    kind: Literal["decode", "mixed"]
    shared: tuple[SharedPrefix, ...] = field(default=())
    token_sources: np.ndarray | None = None

    @property
    def num_tokens(self) -> int:
        return int(self.input_ids.shape[0])

    @property
    def num_drafts(self) -> int:
        return sum(len(row.drafts) for row in self.rows)


class ScheduledRow(NamedTuple):
    """What the scheduler decided for one sequence: compute its next `num_new` tokens, `drafts` the last of them."""

    sequence: Sequence
    num_new: int
    num_logits: int
    drafts: tuple[int, ...] = ()


def slots_of(extents: Iterable[Extent], first: int, last: int) -> np.ndarray:
    """Slots of tokens [first, last) of a sequence that lives in `extents`. int64 [last - first]."""
    pieces = [np.arange(e.start, e.stop, dtype=np.int64) for e in clip_range(extents, first, last)]
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


class SlotMap:
    """All slots that a sequence holds, neighbours joined; kept with the sequence for as long as they stay the same.

    `before` counts the tokens ahead of the last extent: where a sequence grows, only that one changes.
    """

    __slots__ = ("_shared", "_own", "_num_own", "_last", "extents", "before")

    def __init__(self, sequence: Sequence) -> None:
        own = sequence.kv.own
        self._shared, self._own, self._num_own = sequence.kv.shared, own, len(own)
        self._last = own[-1] if own else None
        self.extents = tuple(coalesce([*sequence.kv.shared, *own]))
        self.before = sum(stop - start for start, stop in self.extents[:-1])

    @classmethod
    def of(cls, sequence: Sequence) -> SlotMap:
        held: SlotMap | None = sequence.slot_map
        if held is None or not held._holds(sequence):
            held = sequence.slot_map = cls(sequence)
        return held

    def _holds(self, sequence: Sequence) -> bool:
        own = sequence.kv.own
        return (
            self._own is own
            and self._shared is sequence.kv.shared
            and self._num_own == len(own)
            and (not own or own[-1] is self._last)
        )

    def slot(self, position: int) -> int:
        """The slot of one token."""
        if position >= self.before:
            return self.extents[-1][0] + position - self.before
        return slot_at(self.extents, position)


def slot_at(extents: Iterable[Extent], position: int) -> int:
    """The slot of token `position` of a sequence that lives in `extents`."""
    for start, stop in extents:
        if position < stop - start:
            return start + position
        position -= stop - start
    raise IndexError(f"no slot for token {position} beyond the last")


def build_plan(scheduled: list[ScheduledRow], *, share_decode: bool) -> StepPlan:
    """Lay out the rows of one step: those with one new token, then the others."""
    import torch

    rows: list[PlanRow] = []
    sources: list[int] = []
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    logits_rows: list[int] = []
    scheduled = sorted(scheduled, key=_is_chunk)  # kernels want the decode rows first
    for start, item in enumerate(scheduled):
        if item.num_new > 1:
            break
        sequence = item.sequence
        past, held = sequence.progress.num_computed, SlotMap.of(sequence)
        rows.append(PlanRow(sequence, start, 1, past, held.extents, held))
        known = past < len(sequence.tokens)
        ids.append(sequence.tokens[past] if known else 0)
        sources.append(-1 if known else sequence.progress.pending_index)
        positions.append(past)
        slots.append(held.slot(past))
        if item.num_logits:
            logits_rows.append(start)
    num_decode = start = len(rows)
    pieces = [(np.array(ids, np.int64), np.array(positions, np.int64), np.array(slots, np.int64))]
    for item in scheduled[num_decode:]:
        sequence, num_new = item.sequence, item.num_new
        past = sequence.progress.num_computed
        stop = past + num_new
        held = SlotMap.of(sequence)
        rows.append(PlanRow(sequence, start, num_new, past, held.extents, held, item.drafts))
        prompt = sequence.prompt_ids
        within = stop <= len(prompt) and not item.drafts
        new = prompt[past:stop] if within else np.array([*sequence.tokens[past:stop], *item.drafts], np.int64)
        pieces.append((new, np.arange(past, stop), slots_of(held.extents, past, stop)))
        logits_rows.extend(range(start + num_new - item.num_logits, start + num_new))
        start += num_new
    input_ids, all_positions, out_slots = (np.concatenate(part, dtype=np.int64) for part in zip(*pieces, strict=True))
    token_sources = None
    if any(source >= 0 for source in sources):
        token_sources = np.full(start, -1, np.int32)
        token_sources[:num_decode] = sources
    return StepPlan(
        rows=tuple(rows),
        input_ids=torch.from_numpy(input_ids),
        positions=torch.from_numpy(all_positions),
        out_slots=torch.from_numpy(out_slots),
        logits_rows=torch.tensor(logits_rows, dtype=torch.int64),
        num_logits_per_row=tuple(map(_num_logits, scheduled)),
        kind="decode" if num_decode == len(rows) else "mixed",
        shared=find_shared(rows) if share_decode else (),
        token_sources=token_sources,
    )


def _is_chunk(item: ScheduledRow) -> bool:
    return item.num_new > 1


_num_logits = attrgetter("num_logits")


def find_shared(rows: list[PlanRow], *, min_length: int = 64) -> tuple[SharedPrefix, ...]:
    """Partition rows so that the most KV reads are saved: (rows - 1) x shared tokens, summed over groups.

    Only locked radix prefixes of at least `min_length` tokens count. Rows that append forced tokens share as those
    with one new token do.
    """
    sharing = [i for i, row in enumerate(rows) if row.sequence.kv.num_shared >= min_length]
    return tuple(_partition(rows, sharing, 0, min_length)[1])


def _partition(rows: list[PlanRow], members: list[int], offset: int, min_length: int) -> tuple[int, list[SharedPrefix]]:
    """The best grouping of rows that agree on their first `offset` tokens, and the reads that it saves."""
    first_at: dict[int, int] = {}
    together: dict[int, list[int]] = {}  # by their first: most rows share nothing and need no list
    for index in members:
        if rows[index].sequence.kv.num_shared > offset:
            first = first_at.setdefault(slot_at(rows[index].extents, offset), index)
            if first != index:
                together.setdefault(first, [first]).append(index)
    saved = 0
    groups: list[SharedPrefix] = []
    for group in together.values():
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
    length = min(row.sequence.kv.num_shared for row in rows)
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
