"""StepPlan: the rows of one step for the scheduler, and as a WirePlan for the runner; InFlightStep: a launched one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from graftlm.core.execution.media_rows import MediaRows
from graftlm.core.kv.pages import coalesce
from graftlm.core.sequence import Sequence
from graftlm.kernels.wire_plan import Extent, SharedPrefix, WirePlan, indptr_of, slots_of

if TYPE_CHECKING:
    import torch

    from graftlm.core.sampling.step_sampler import PendingTokens


class PlanRow(NamedTuple):
    """One sequence in one step: its tokens [past, past + num_new) are computed.

    slot_map  all slots of the sequence
    drafts    the last of the new tokens, which are guesses: the sequence does not have them yet
    """

    sequence: Sequence
    num_new: int
    past: int
    slot_map: SlotMap
    drafts: tuple[int, ...] = ()

    @property
    def kv_len(self) -> int:
        return self.past + self.num_new


@dataclass(eq=False)
class StepPlan:
    """One step, as the engine's thread keeps it until its tokens are committed.

    rows  in the order of the wire plan's rows
    num_logits_per_row  for each row, the number of its logits: 0, 1, or more when scoring and with drafts
    wire  the part that the runner gets
    """

    rows: tuple[PlanRow, ...]
    num_logits_per_row: tuple[int, ...]
    wire: WirePlan

    @property
    def num_tokens(self) -> int:
        return self.wire.num_tokens

    @property
    def num_drafts(self) -> int:
        return sum(len(row.drafts) for row in self.rows)


@dataclass(eq=False)
class InFlightStep:
    """A step that was launched and whose results have not been committed.

    pending  the tokens that the device samples; None until it is asked to, and where the host samples
    """

    plan: StepPlan
    logits: torch.Tensor
    pending: PendingTokens | None

    @property
    def constrained(self) -> bool:
        return any(row.sequence.constrained for row in self.plan.rows)


class ScheduledRow(NamedTuple):
    """What the scheduler decided for one sequence: compute its next `num_new` tokens, `drafts` the last of them."""

    sequence: Sequence
    num_new: int
    num_logits: int
    drafts: tuple[int, ...] = ()


_numbers = count()


class SlotMap:
    """All slots that a sequence holds, neighbours joined; kept with the sequence for as long as they stay the same.

    number   of this list of slots, as in WirePlan.slot_maps
    before   tokens ahead of the last extent: while a sequence grows in place, only that extent changes
    array    the extents, int64 [num_extents, 2]
    """

    __slots__ = ("_shared", "_own", "_num_own", "_last", "number", "extents", "before", "array")

    def __init__(self, sequence: Sequence) -> None:
        own = sequence.kv.own
        self._shared, self._own, self._num_own = sequence.kv.shared, own, len(own)
        self._last = own[-1] if own else None
        self.extents = tuple(coalesce([*sequence.kv.shared, *own]))
        self.before = sum(stop - start for start, stop in self.extents[:-1])
        self.number = next(_numbers)
        self.array = np.array(self.extents, np.int64).reshape(-1, 2)

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
    """Lay out the rows of one step: those with one new token, then the others.

    share_decode  find the prefixes that rows share, so that kernels read them once
    """
    rows: list[PlanRow] = []
    sources: list[int] = []
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    logits_rows: list[int] = []
    media: MediaRows | None = None
    scheduled = sorted(scheduled, key=_is_chunk)  # kernels want the decode rows first
    for start, item in enumerate(scheduled):
        if item.num_new > 1:
            break
        sequence = item.sequence
        past, held = sequence.progress.num_computed, SlotMap.of(sequence)
        rows.append(PlanRow(sequence, 1, past, held))
        known = past < len(sequence.tokens)
        token_id, position = sequence.tokens[past] if known else 0, past
        if sequence.prompt.layout is not None or sequence.prompt.spans:
            media = media or MediaRows()
            token_id, position = media.add_one(sequence.prompt, token_id, past, start)
        ids.append(token_id)
        sources.append(-1 if known else sequence.progress.pending_index)
        positions.append(position)
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
        rows.append(PlanRow(sequence, num_new, past, held, item.drafts))
        prompt = sequence.prompt_ids
        within = stop <= len(prompt) and not item.drafts
        new = prompt[past:stop] if within else np.array([*sequence.tokens[past:stop], *item.drafts], np.int64)
        places = np.arange(past, stop)
        if sequence.prompt.layout is not None or sequence.prompt.spans:
            media = media or MediaRows()
            new, places = media.add(sequence.prompt, new, past, start)
        pieces.append((new, places, slots_of(held.extents, past, stop)))
        logits_rows.extend(range(start + num_new - item.num_logits, start + num_new))
        start += num_new
    if len(rows) == num_decode:
        ((input_ids, all_positions, out_slots),) = pieces
    else:
        input_ids, all_positions, out_slots = (
            np.concatenate(part, dtype=np.int64) for part in zip(*pieces, strict=True)
        )
    token_sources = None
    if any(source >= 0 for source in sources):
        token_sources = np.full(start, -1, np.int32)
        token_sources[:num_decode] = sources
    extents = [row.slot_map.array for row in rows]
    wire = WirePlan(
        input_ids=input_ids,
        positions=all_positions,
        out_slots=out_slots,
        logits_rows=np.array(logits_rows, np.int64),
        num_new=np.array([row.num_new for row in rows], np.int64),
        past=np.array([row.past for row in rows], np.int64),
        extents=np.concatenate(extents),
        extent_ptr=indptr_of(list(map(len, extents))),
        sequences=np.array([row.sequence.number for row in rows], np.int64),
        slot_maps=np.array([row.slot_map.number for row in rows], np.int64),
        token_sources=token_sources,
    )
    if media is not None:
        wire = media.written(wire)
    if share_decode and (shared := find_shared(rows)):
        wire = wire.sharing(shared)
    return StepPlan(tuple(rows), tuple(map(_num_logits, scheduled)), wire)


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
            first = first_at.setdefault(slot_at(rows[index].slot_map.extents, offset), index)
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
            saved, groups = saved + whole, [*groups, SharedPrefix(common, tuple(group))]
    return saved, groups


def _common_length(rows: list[PlanRow]) -> int:
    """How many leading tokens of all `rows` lie in the same slots."""
    length = min(row.sequence.kv.num_shared for row in rows)
    first = rows[0].slot_map.extents
    for row in rows[1:]:
        common = 0
        for (a_start, a_stop), (b_start, b_stop) in zip(first, row.slot_map.extents, strict=False):
            if a_start != b_start:
                break
            common += min(a_stop, b_stop) - a_start
            if a_stop != b_stop:
                break
        length = min(length, common)
    return length
