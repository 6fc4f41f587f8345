"""Regular expressions of numbers and dates between two bounds, as texts."""

from __future__ import annotations

import re

_MOST_DIGITS = 18


def integers(low: int | None = None, high: int | None = None) -> str:
    """Integers from `low` to `high`, both included, as JSON writes them; of at most 18 digits where not bounded.

    A pattern without a text where there is none.
    """
    largest = 10**_MOST_DIGITS - 1
    low, high = max(-largest, -largest if low is None else low), min(largest, largest if high is None else high)
    ways = [f"-({_naturals(max(1, -high), -low)})"] if low < 0 and low <= high else []
    if high >= max(low, 0):
        ways.append(_naturals(max(low, 0), high))
    return "|".join(ways) or "[^\\s\\S]"


def between(low: str, high: str) -> str:
    """Texts from `low` to `high`, which are equally long and differ in digits alone."""
    if low == high:
        return re.escape(low)
    if low[0] == high[0]:
        return re.escape(low[0]) + between(low[1:], high[1:])
    least, most = re.sub("[0-9]", "0", low[1:]), re.sub("[0-9]", "9", high[1:])
    first, last = int(low[0]) + (low[1:] != least), int(high[0]) - (high[1:] != most)
    ways = [low[0] + between(low[1:], most)] if low[1:] != least else []
    if first <= last:
        ways.append((f"[{first}-{last}]" if first < last else str(first)) + _any(low[1:]))
    if high[1:] != most:
        ways.append(high[0] + between(least, high[1:]))
    return ways[0] if len(ways) == 1 else f"({'|'.join(ways)})"


def _naturals(low: int, high: int) -> str:
    ways = []
    for length in range(len(str(low)), len(str(high)) + 1):
        first, last = max(low, 10 ** (length - 1) if length > 1 else 0), min(high, 10**length - 1)
        ways.append(between(str(first), str(last)))
    return "|".join(ways)


def _any(text: str) -> str:
    return "".join("[0-9]" if char.isdigit() else re.escape(char) for char in text)
