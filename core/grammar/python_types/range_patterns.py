"""Regular expressions of the numbers, moments and durations between two bounds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime, time, timedelta
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Final

_MOST_DIGITS: Final = 18
NEVER: Final = "[^\\s\\S]"
INTEGER: Final = r"-?(0|[1-9][0-9]{0,17})"
NUMBER: Final = r"-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,12})?"
_FRACTION: Final = r"(\.[0-9]{1,12})?"
_SOME_FRACTION: Final = r"\.[0-9]{0,11}[1-9]"
_LARGEST_NUMBER: Final = 10**16 - 1
_SECOND: Final = timedelta(seconds=1)


def integer_pattern(low: int | None = None, high: int | None = None) -> str:
    """Return a pattern of the integers from `low` to `high`, both included, as JSON writes them.

    Integers without a bound have at most 18 digits. The pattern matches nothing if `high` is below `low`.
    """
    largest = 10**_MOST_DIGITS - 1
    low, high = max(-largest, -largest if low is None else low), min(largest, largest if high is None else high)
    ways = [f"-({_naturals(max(1, -high), -low)})"] if low < 0 and low <= high else []
    if high >= max(low, 0):
        ways.append(_naturals(max(low, 0), high))
    return "|".join(ways) or NEVER


def number_pattern(low: Decimal | None, high: Decimal | None, *, above: bool = False, below: bool = False) -> str:
    """Return a pattern of decimal numbers from `low` to `high`.

    above  exclude `low`
    below  exclude `high`

    Numbers have at most 16 digits before the point and 12 behind it. Where a bound is no integer, the numbers between
    it and the next integer inside the bounds are left out: the pattern may match nothing although numbers exist.
    """
    if low is None and high is None:
        return NUMBER
    ways = _magnitudes(low, high, above, below)
    negative = _magnitudes(None if high is None else -high, None if low is None else -low, below, above)
    return "|".join([*ways, *(f"-({way})" for way in negative)]) or NEVER


def _magnitudes(low: Decimal | None, high: Decimal | None, above: bool, below: bool) -> list[str]:
    """Return patterns of the numbers between the bounds that are not negative."""
    if low is None or low < 0:
        low, above = Decimal(0), False
    first = int(low.to_integral_value(ROUND_CEILING))
    last = _LARGEST_NUMBER if high is None else min(_LARGEST_NUMBER, int(high.to_integral_value(ROUND_FLOOR)))
    ways = []
    if above and first == low and first < last:  # `low` itself is excluded, not the fractions above it
        ways.append(f"{first}{_SOME_FRACTION}")
        first += 1
    if first < last:
        ways.append(f"({_naturals(first, last - 1)}){_FRACTION}")
    if first <= last and not (below and last == high):
        ways.append(str(last))
    return ways


def between_pattern(low: str, high: str) -> str:
    """Return a pattern of the texts from `low` to `high`, which are equally long and differ in digits only."""
    if low == high:
        return re.escape(low)
    if low[0] == high[0]:
        return re.escape(low[0]) + between_pattern(low[1:], high[1:])
    least, most = re.sub("[0-9]", "0", low[1:]), re.sub("[0-9]", "9", high[1:])
    first, last = int(low[0]) + (low[1:] != least), int(high[0]) - (high[1:] != most)
    ways = [low[0] + between_pattern(low[1:], most)] if low[1:] != least else []
    if first <= last:
        ways.append((f"[{first}-{last}]" if first < last else str(first)) + _any(low[1:]))
    if high[1:] != most:
        ways.append(high[0] + between_pattern(least, high[1:]))
    return ways[0] if len(ways) == 1 else f"({'|'.join(ways)})"


def moment_pattern(low: datetime, high: datetime) -> str:
    """Return a pattern of the datetimes from `low` to `high`, both included, without an offset.

    Months and days are not checked beyond the bounds: use it beside a pattern of datetimes.
    """
    return _moments(low, high)


def time_pattern(low: time, high: time) -> str:
    """Return a pattern of the times from `low` to `high`, both included, without an offset."""
    day = datetime(2000, 1, 1)
    first, last = datetime.combine(day, low.replace(tzinfo=None)), datetime.combine(day, high.replace(tzinfo=None))
    return _moments(first, last, skip=len("2000-01-01T"))


def _moments(low: datetime, high: datetime, skip: int = 0) -> str:
    def seconds(moment: datetime) -> str:
        return moment.isoformat(timespec="seconds")[skip:]

    if low > high:
        return NEVER
    fine = [moment.isoformat(timespec="microseconds")[skip:] for moment in (low, high)]
    ways = [between_pattern(*fine)]
    first = low if low.microsecond == 0 else _next_second(low)
    last = high.replace(microsecond=0)
    if first is not None and first <= last:
        ways.append(between_pattern(seconds(first), seconds(last)))
        if first < last:
            ways.append(between_pattern(seconds(first), seconds(last - _SECOND)) + r"\.[0-9]{1,6}")
    return "|".join(ways)


def _next_second(moment: datetime) -> datetime | None:
    try:
        return moment.replace(microsecond=0) + _SECOND
    except OverflowError:
        return None


_SECONDS: Final = r"[0-9]{1,2}(\.[0-9]{6})?S"
_CLOCK: Final = rf"([0-9]{{1,2}}H([0-9]{{1,2}}M)?({_SECONDS})?|[0-9]{{1,2}}M({_SECONDS})?|{_SECONDS})"
_SPELLED: Final = rf"-?P([0-9]{{1,6}}D(T{_CLOCK})?|T{_CLOCK})"
_COUNTS: Final = (10**6, 24, 60, 60, 10**6)
LONGEST: Final = timedelta(days=10**6) - timedelta(microseconds=1)


def duration_patterns(low: timedelta, high: timedelta) -> tuple[str, str]:
    """Return two patterns that ISO 8601 durations from `low` to `high`, both included, match together.

    Units are days, hours below 24, minutes and seconds below 60, and six digits of a second. Units of 0 may be left
    out. No duration is longer than 999,999 days.
    """
    zero = timedelta(0)
    ways = []
    if high >= max(low, zero):
        ways.append(f"P{_units(_split(max(low, zero)), _split(min(high, LONGEST)))}")
    if low < zero and low <= high:
        ways.append(f"-P{_units(_split(max(-high, zero)), _split(min(-low, LONGEST)))}")
    return _SPELLED, "|".join(ways) or NEVER


def _split(duration: timedelta) -> tuple[int, ...]:
    """Return days, hours, minutes, seconds and microseconds of a duration that is not negative."""
    minutes, seconds = divmod(duration.seconds, 60)
    return duration.days, *divmod(minutes, 60), seconds, duration.microseconds


def _units(low: Sequence[int], high: Sequence[int], unit: int = 0) -> str:
    """Return a pattern of the units from `unit` on whose values lie between `low` and `high`, in their order."""
    if unit == len(_COUNTS):
        return ""
    if low[0] == high[0]:
        return _unit(unit, low[0], high[0]) + _units(low[1:], high[1:], unit + 1)
    least = [0] * (len(low) - 1)
    most = [count - 1 for count in _COUNTS[unit + 1 :]]
    first, last = low[0] + (list(low[1:]) != least), high[0] - (list(high[1:]) != most)
    ways = []
    if first > low[0]:
        ways.append(_unit(unit, low[0], low[0]) + _units(low[1:], most, unit + 1))
    if first <= last:
        ways.append(_unit(unit, first, last) + _units(least, most, unit + 1))
    if last < high[0]:
        ways.append(_unit(unit, high[0], high[0]) + _units(least, high[1:], unit + 1))
    return ways[0] if len(ways) == 1 else f"({'|'.join(ways)})"


def _unit(unit: int, low: int, high: int) -> str:
    """Return a pattern of one unit's value from `low` to `high`; a value of 0 may be left out."""
    if unit == len(_COUNTS) - 1:
        digits = rf"\.{between_pattern(f'{low:06}', f'{high:06}')}S"
        return f"({digits}|S|)" if low == 0 else digits
    written = f"({_naturals(low, high)}){'DHM'[unit] if unit < 3 else ''}"
    written = f"({written}|)" if low == 0 else written
    return f"{written}T?" if unit == 0 else written


def _naturals(low: int, high: int) -> str:
    ways = []
    for length in range(len(str(low)), len(str(high)) + 1):
        first, last = max(low, 10 ** (length - 1) if length > 1 else 0), min(high, 10**length - 1)
        ways.append(between_pattern(str(first), str(last)))
    return "|".join(ways)


def _any(text: str) -> str:
    return "".join("[0-9]" if char.isdigit() else re.escape(char) for char in text)
