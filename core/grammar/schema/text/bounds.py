"""Numbers within bounds, as regular languages over their decimal text: no exponent, no "-0"."""

from __future__ import annotations

from decimal import Decimal
from functools import lru_cache
from math import ceil, floor

from graftlm.core.grammar.nodes import nodes
from graftlm.core.grammar.nodes.nodes import EMPTY, Node
from graftlm.core.grammar.schema.algebra.shapes import Number

NOTHING: Node = nodes.NOTHING

DIGIT = nodes.chars("0123456789")
NONZERO = nodes.chars("123456789")
ZERO = nodes.literal("0")
POINT = nodes.literal(".")
MAX_NESTED = 40
"""Digits of a bound up to which a node stands inside a node for each of them."""
FRACTION = nodes.optional(nodes.concat(POINT, nodes.plus(DIGIT)))


def integers(low: int | None, high: int | None) -> Node:
    """Integers from `low` to `high`, both included; None is no bound."""
    negative, positive = NOTHING, NOTHING
    if low is None or low < 0:
        negative = _naturals(max(1, -high) if high is not None else 1, None if low is None else -low)
    if high is None or high >= 0:
        positive = _naturals(max(0, low) if low is not None else 0, high)
    return nodes.alternation(nodes.concat(nodes.literal("-"), negative), positive)


@lru_cache(maxsize=256)
def in_bounds(shape: Number) -> Node:
    low, high = shape.minimum, shape.maximum
    if shape.integer:
        return integers(
            None if low is None else floor(low) + 1 if shape.exclusive_minimum else ceil(low),
            None if high is None else ceil(high) - 1 if shape.exclusive_maximum else floor(high),
        )
    zero = Decimal(0)
    negative, positive = NOTHING, NOTHING
    if low is None or low < 0:
        nearest = (-high, shape.exclusive_maximum) if high is not None and high < 0 else (zero, True)
        negative = _decimals(nearest, None if low is None else (-low, shape.exclusive_minimum))
    if high is None or high >= 0:
        nearest = (low, shape.exclusive_minimum) if low is not None and low >= 0 else (zero, False)
        positive = _decimals(nearest, None if high is None else (high, shape.exclusive_maximum))
    return nodes.alternation(nodes.concat(nodes.literal("-"), negative), positive)


def _naturals(low: int, high: int | None) -> Node:
    """Integers from `low` >= 0 to `high`, without leading zeros."""
    if high is not None and low > high:
        return NOTHING
    least = str(low)
    if high is None:
        longer = nodes.concat(NONZERO, nodes.repeat(DIGIT, len(least), None))
        return nodes.alternation(_same_length(least, "9" * len(least)), longer)
    most = str(high)
    if len(least) == len(most):
        return _same_length(least, most)
    between = (
        nodes.concat(NONZERO, nodes.repeat(DIGIT, len(least), len(most) - 2)) if len(most) > len(least) + 1 else NOTHING
    )
    return nodes.alternation(
        _same_length(least, "9" * len(least)), between, _same_length("1" + "0" * (len(most) - 1), most)
    )


def _same_length(low: str, high: str) -> Node:
    """Digit strings from `low` to `high`, all of one length."""
    if not low:
        return EMPTY
    if max(len(low.rstrip("0")), len(high.rstrip("9"))) > MAX_NESTED:
        return _same_length_automaton(low, high)
    first, last, rest = int(low[0]), int(high[0]), len(low) - 1
    if first == last:
        return nodes.concat(nodes.literal(low[0]), _same_length(low[1:], high[1:]))
    ways = []
    if low[1:] != "0" * rest:
        ways.append(nodes.concat(nodes.literal(low[0]), _same_length(low[1:], "9" * rest)))
        first += 1
    tail = NOTHING
    if high[1:] != "9" * rest:
        tail = nodes.concat(nodes.literal(high[0]), _same_length("0" * rest, high[1:]))
        last -= 1
    if first <= last:
        ways.append(nodes.concat(_digits(first, last), nodes.repeat(DIGIT, rest, rest)))
    return nodes.alternation(*ways, tail)


def _same_length_automaton(low: str, high: str) -> Node:
    """The same; a state is a place, and whether the digits so far are those of `low`, and those of `high`."""
    start = (0, True, True)
    numbers = {start: 0}
    states = [start]
    rows: list[tuple[tuple[int, int, int], ...]] = []
    for place, on_low, on_high in states:  # it grows meanwhile
        row = []
        if place < len(low):
            first, last = int(low[place]) if on_low else 0, int(high[place]) if on_high else 9
            for digit in range(first, last + 1):
                target = (place + 1, on_low and digit == first, on_high and digit == last)
                if target not in numbers:
                    numbers[target] = len(states)
                    states.append(target)
                row.append((0x30 + digit, 0x30 + digit, numbers[target]))
        rows.append(tuple(row))
    return nodes.Automaton.of(rows, [numbers[state] for state in states if state[0] == len(low)])


def _digits(first: int, last: int) -> Node:
    return nodes.char_set([(0x30 + first, 0x30 + last)])


Bound = tuple[Decimal, bool]
"""A value that is not negative, and whether it is itself left out."""


def _decimals(low: Bound, high: Bound | None) -> Node:
    """Decimals without sign and exponent from `low` to `high`."""
    if high is not None and low[0] > high[0]:
        return NOTHING
    whole, part = _split(low[0])
    first, least = NOTHING, whole  # the numbers that begin with the digits of a bound, and the wholes between
    if part or low[1]:
        first, least = _with_fraction(whole, (part, low[1]), None), whole + 1
    if high is None:
        return nodes.alternation(first, nodes.concat(_naturals(least, None), FRACTION))
    top, top_part = _split(high[0])
    if whole == top:
        return _with_fraction(whole, (part, low[1]), (top_part, high[1]))
    last = _with_fraction(top, None, (top_part, high[1]))
    return nodes.alternation(first, nodes.concat(_naturals(least, top - 1), FRACTION), last)


def _split(value: Decimal) -> tuple[int, str]:
    whole, _, part = format(value, "f").partition(".")
    return int(whole), part.rstrip("0")


Digits = tuple[str, bool] | None
"""Digits after the point that the text still follows, without trailing zeros, and whether to end on them is too few
or too many; None once the text has left them on the right side."""


def _with_fraction(whole: int, low: Digits, high: Digits) -> Node:
    ends, more = _tail(low, high)
    return nodes.concat(
        nodes.literal(str(whole)), nodes.alternation(*([EMPTY] if ends else []), nodes.concat(POINT, more))
    )


def _tail(low: Digits, high: Digits) -> tuple[bool, Node]:
    """Whether the digits may end here, and the non-empty digit strings that may follow."""
    if low == ("", False):
        low = None
    if high is not None and not high[0]:  # only zeros keep it from growing
        return low is None and not high[1], nodes.plus(ZERO) if low is None and not high[1] else NOTHING
    if low is None and high is None:
        return True, nodes.plus(DIGIT)
    if low == ("", True) and high is None:
        return False, nodes.concat(nodes.star(ZERO), NONZERO, nodes.star(DIGIT))
    num_zeros = _num_zeros((low or high or ("", True))[0])
    if num_zeros > 1 and (low is None or high is None):  # hundreds of them, perhaps
        ends, more = _tail(low and (low[0][num_zeros:], low[1]), high and (high[0][num_zeros:], high[1]))
        beyond = nodes.concat(nodes.literal("0" * num_zeros), nodes.alternation(*([EMPTY] if ends else []), more))
        before = nodes.repeat(ZERO, 1, num_zeros - 1)
        if low is not None:
            before = nodes.concat(nodes.optional(before), NONZERO, nodes.star(DIGIT))
        return low is None, nodes.alternation(before, beyond)
    first = int(low[0][0]) if low is not None and low[0] else 0
    last = int(high[0][0]) if high is not None else 9
    ways = []
    for digit in range(first, last + 1):
        next_low = (low[0][1:], low[1]) if low is not None and digit == first else None
        next_high = (high[0][1:], high[1]) if high is not None and digit == last else None
        ends, more = _tail(next_low, next_high)
        ways.append(nodes.concat(nodes.literal(str(digit)), nodes.alternation(*([EMPTY] if ends else []), more)))
    return low is None, nodes.alternation(*ways)


def _num_zeros(digits: str) -> int:
    return len(digits) - len(digits.lstrip("0"))
