"""The token masks of a step's rows: those that a library computes outside of Python's lock, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from graftlm.core.errors import GraftError, failure_of

if TYPE_CHECKING:
    from graftlm.core.grammar.matcher import MaskRow, Matcher

_LEAST = 3
"""Rows that are worth a thread: handing them over costs about as much as a cheap mask."""


class MaskJob(NamedTuple):
    """One row to fill: its place among the sequences, who fills it, and the row, with anything in it."""

    place: int
    matcher: Matcher
    row: MaskRow


Filled = dict[int, "bool | GraftError"]
"""By place: whether the mask need be applied, or what its matcher raised."""


def fill(jobs: Sequence[MaskJob]) -> Filled:
    """Fill all rows. What a matcher raises is its own row's."""
    shared = [job for job in jobs if getattr(job.matcher, "fills_outside_lock", False)]
    if len(shared) < 2 * _LEAST:
        return _fill(jobs)
    from graftlm.core.grammar.masks import workers

    num_parts = min(workers.masks.count + 1, len(shared) // _LEAST)
    elsewhere = [workers.masks.submit(_fill, shared[part::num_parts]) for part in range(1, num_parts)]
    own = {job.place for part in range(1, num_parts) for job in shared[part::num_parts]}
    filled = _fill([job for job in jobs if job.place not in own])
    for part in elsewhere:
        filled.update(part.result())
    return filled


def _fill(jobs: Sequence[MaskJob]) -> Filled:
    filled: Filled = {}
    for place, matcher, row in jobs:
        row[:] = 0
        try:
            filled[place] = matcher.fill_mask(row)
        except BaseException as error:  # the panic of a library in Rust is no Exception
            filled[place] = failure_of(error)
    return filled
