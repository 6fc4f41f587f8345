"""Needed values: those that an item must not take because later items, which must differ, have no others.

Each item up to `minItems` that allows few values has to get one of its own: a matching of places to values. A value
that every such matching uses is needed.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_PLACES = 64
"""Later items that are looked at, beyond which no value is called needed."""


def needed_values(places: Sequence[frozenset[str]]) -> frozenset[str]:
    """The values without one of which the places could not have different values; none if they cannot with all."""
    holder: dict[str, int] = {}
    if len(places) > MAX_PLACES or num_different(places, holder) < len(places):
        return frozenset()
    return frozenset(value for value, place in holder.items() if not _can_move(places, place, value, dict(holder)))


def num_different(places: Sequence[frozenset[str]], holder: dict[str, int] | None = None) -> int:
    """How many places, from the first on, can have different values. holder: which place got each value"""
    holder = {} if holder is None else holder
    return next((place for place in range(len(places)) if not _place(places, place, holder, set())), len(places))


def _can_move(places: Sequence[frozenset[str]], place: int, value: str, holder: dict[str, int]) -> bool:
    """Whether the place that holds `value` finds another one, others moving where they can."""
    del holder[value]
    return _place(places, place, holder, {value})


def _place(places: Sequence[frozenset[str]], place: int, holder: dict[str, int], tried: set[str]) -> bool:
    """Give a place a value of its own, moving others where that is needed; False where there is none."""
    for value in sorted(places[place]):
        if value in tried:
            continue
        tried.add(value)
        if value not in holder or _place(places, holder[value], holder, tried):
            holder[value] = place
            return True
    return False
