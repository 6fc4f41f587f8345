"""Numbers within bounds, and multiples of a number, as regular languages over their decimal text.

Free numbers have every spelling that JSON has; integers but "-0". Bounded ones, and multiples, are written without an
exponent and without "-0": with an exponent the language would not be regular.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from functools import cache
from math import lcm, ulp

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.nodes import nodes
from graftlm.core.grammar.nodes.nodes import EMPTY, Node
from graftlm.core.grammar.regex import parser
from graftlm.core.grammar.schema.algebra.scalars import ONE_SPELLING
from graftlm.core.grammar.schema.algebra.shapes import Number
from graftlm.core.grammar.schema.text.bounds import DIGIT, FRACTION, NONZERO, NOTHING, POINT, ZERO, in_bounds

NATURAL = nodes.alternation(ZERO, nodes.concat(NONZERO, nodes.star(DIGIT)))
EXPONENT = nodes.optional(nodes.concat(nodes.chars("eE"), nodes.optional(nodes.chars("+-")), nodes.plus(DIGIT)))
INTEGER = nodes.alternation(ZERO, nodes.concat(nodes.optional(nodes.literal("-")), NONZERO, nodes.star(DIGIT)))
NUMBER = nodes.concat(nodes.optional(nodes.literal("-")), NATURAL, FRACTION, EXPONENT)
MAX_RESIDUES = 2_000
MAX_INTEGER_DIGITS = 18
MAX_DIGITS = 17
EXACT_DIGITS = 15
"""Significant digits with which different decimals are different float64 as well."""
_MAX_PLACES = 6
_LARGEST_FLOAT = Decimal(repr(sys.float_info.max))
_SMALLEST_FLOAT = Decimal(repr(ulp(0.0)))
_MAX_COUNTED, _MIN_COUNTED = 2_000, 8  # residues times digits; digits with however many residues


def number(shape: Number) -> Node:
    """All texts of numbers of this shape (see above for what bounds leave out); NOTHING when there is none."""
    if shape.one_spelling:
        return nodes.Intersection((number(replace(shape, one_spelling=False)), parser.parse(ONE_SPELLING)))
    if shape.no_multiple_of:
        allowed = number(replace(shape, no_multiple_of=())) if shape.multiple_of else in_bounds(shape)
        return nodes.Difference(
            allowed, nodes.alternation(*(_multiples((step,), False) for step in shape.no_multiple_of))
        )
    bounded = shape.minimum is not None or shape.maximum is not None
    if not bounded and not shape.multiple_of:
        return INTEGER if shape.integer else NUMBER
    if not shape.multiple_of:
        return in_bounds(shape)
    multiples = _multiples(shape.multiple_of, shape.integer)
    return nodes.Intersection((in_bounds(shape), multiples)) if bounded else multiples


def readable(shape: Number) -> Node:
    """The numbers of `shape` that common readers hold: integers of 18 digits, others of 17 significant digits.

    What the shape itself bounds stays. Exponents have two digits. For multiples see `_readable_multiples`.
    """
    if shape.one_spelling:
        return number(shape)
    if shape.multiple_of or shape.no_multiple_of:
        return _readable_multiples(shape)
    if shape.integer:
        limit = Decimal(10**MAX_INTEGER_DIGITS) - 1
        low = -limit if shape.minimum is None and (shape.maximum is None or shape.maximum >= -limit) else shape.minimum
        high = limit if shape.maximum is None and (shape.minimum is None or shape.minimum <= limit) else shape.maximum
        return number(replace(shape, minimum=low, maximum=high))
    shape = _unlike_zero(shape)
    low, high = shape.minimum, shape.maximum
    if low is None and high is None:
        return _float_automaton()
    # with 17 digits, 4.9999999999999999 is below 5 but not once it is read
    most = EXACT_DIGITS if (shape.exclusive_minimum and low) or (shape.exclusive_maximum and high) else MAX_DIGITS
    if low is not None and high is not None:
        num_digits = len(str(int(max(abs(low), abs(high)))))
        return _capped(number(shape), max(1, most - num_digits))
    if (low or 0) >= 10**most or (high or 0) <= -(10**most):  # float64 has no fractions there
        low = -_LARGEST_FLOAT if low is None and (high or 0) > -_LARGEST_FLOAT else low
        high = _LARGEST_FLOAT if high is None and (low or 0) < _LARGEST_FLOAT else high
        return number(replace(shape, minimum=low, maximum=high, integer=True))
    if low == 0 and not shape.exclusive_minimum:
        return SIGNIFICANT
    return nodes.Intersection(
        (number(shape), nodes.concat(nodes.optional(nodes.literal("-")), _significant(most, most)))
    )


def _unlike_zero(shape: Number) -> Number:
    """`shape` without what is above or below zero but so close to it that it is read as zero."""
    low, high = shape.minimum, shape.maximum
    if low == 0 and shape.exclusive_minimum and high is not None and high < sys.float_info.min:
        return replace(shape, minimum=_SMALLEST_FLOAT, exclusive_minimum=False)
    if high == 0 and shape.exclusive_maximum and low is not None and low > -sys.float_info.min:
        return replace(shape, maximum=-_SMALLEST_FLOAT, exclusive_maximum=False)
    return shape


def _readable_multiples(shape: Number) -> Node:
    """The numbers of `shape`, which has steps, that are multiples, or none, to a reader with float64 too.

    Multiples of whole numbers are written without a fraction, so that readers hold them exactly, in at most 18 digits
    unless that needs many states. Others have 15 digits, those that a step has after its point among them; with steps
    that they must not be multiples of, at most 9 before a point and 6 after it: to count them together takes ten times
    the states.
    """
    places = max(_num_places(step) for step in (*shape.multiple_of, *shape.no_multiple_of))
    if shape.multiple_of and not places:
        shape = replace(shape, integer=True)
    is_exact = shape.integer and not places
    num_whole = MAX_INTEGER_DIGITS if is_exact else max(1, EXACT_DIGITS - places)
    modulus, _ = _modulus(shape.multiple_of or shape.no_multiple_of, shape.integer)
    is_large = modulus * num_whole > _MAX_COUNTED
    if is_large and shape.multiple_of and not is_exact:
        is_large, num_whole = False, min(num_whole, max(_MIN_COUNTED, _MAX_COUNTED // modulus))
    low, high = shape.minimum, shape.maximum
    limit = 10 ** (num_whole - 1)
    is_beyond = (low is not None and low >= limit) or (high is not None and high <= -limit)
    if is_large or is_beyond or (is_exact and low is not None and high is not None):
        return number(shape)
    if shape.multiple_of:
        allowed = _multiples(shape.multiple_of, shape.integer, num_whole)
    elif shape.integer or modulus == 1:
        significant = _significant(num_whole if shape.integer else EXACT_DIGITS, num_whole)
        allowed = nodes.concat(nodes.optional(nodes.literal("-")), significant)
    else:
        allowed = _short(num_whole)
    within = nodes.Intersection((in_bounds(replace(shape, multiple_of=(), no_multiple_of=())), allowed))
    if not shape.no_multiple_of:
        return within
    return nodes.Difference(within, nodes.alternation(*(_multiples((step,), False) for step in shape.no_multiple_of)))


def _num_places(step: Decimal) -> int:
    """Digits after the point, as it is written: 7.0 has one, and readers divide by it in float64."""
    exponent = step.as_tuple().exponent
    return max(0, -exponent) if isinstance(exponent, int) else 0


def _capped(node: Node, count: int) -> Node:
    """`node`, whose endless repeats are of digits, with at most `count` of them."""
    if isinstance(node, nodes.Repeat) and node.max is None:
        return nodes.repeat(node.item, node.min, max(node.min, count))
    return nodes.map_children(lambda child: _capped(child, count), node)


def _significant(num_digits: int, num_whole: int) -> Node:
    """Digits, a point among them or none: `num_digits` but for the zero that leads, `num_whole` before the point."""

    def fraction(most: int) -> Node:
        return nodes.concat(POINT, nodes.repeat(DIGIT, 1, most))

    after: Node = EMPTY
    for written in range(num_whole, 0, -1):
        more = nodes.concat(DIGIT, after) if written < num_whole else NOTHING
        left = num_digits - written
        after = nodes.optional(nodes.alternation(fraction(left) if left else NOTHING, more))
    return nodes.alternation(nodes.concat(ZERO, nodes.optional(fraction(num_digits))), nodes.concat(NONZERO, after))


def _short(num_whole: int) -> Node:
    """Numbers of at most 15 digits, `num_whole` before the point, that take few states."""
    most = min(num_whole, EXACT_DIGITS - _MAX_PLACES)
    whole = nodes.alternation(ZERO, nodes.concat(NONZERO, nodes.repeat(DIGIT, 0, most - 1)))
    longer = nodes.concat(NONZERO, nodes.repeat(DIGIT, most, num_whole - 1))
    fraction = nodes.concat(POINT, nodes.repeat(DIGIT, 1, _MAX_PLACES))
    return nodes.concat(
        nodes.optional(nodes.literal("-")), nodes.alternation(nodes.concat(whole, nodes.optional(fraction)), longer)
    )


SIGNIFICANT = _significant(MAX_DIGITS, MAX_DIGITS)
FLOAT = nodes.concat(
    nodes.optional(nodes.literal("-")),
    SIGNIFICANT,
    nodes.optional(nodes.concat(nodes.chars("eE"), nodes.optional(nodes.chars("+-")), nodes.repeat(DIGIT, 1, 2))),
)


@cache
def _float_automaton() -> Node:
    """FLOAT with as few states as can be."""
    start, minus, zero, exponent, sign, ones, tens = range(7)
    whole, left = 7, 7 + MAX_DIGITS  # after 1 digit, 2, ...; with 0 digits after the point left, 1, ...

    def digits(target: int) -> tuple[int, int, int]:
        return (0x30, 0x39, target)

    to_exponent = [(0x45, 0x45, exponent), (0x65, 0x65, exponent)]
    first = [(0x30, 0x30, zero), (0x31, 0x39, whole)]
    points = left + MAX_DIGITS + 1  # the same as `left`, right after the point
    rows: list[list[tuple[int, int, int]]] = [
        [(0x2D, 0x2D, minus), *first],
        first,
        [(0x2E, 0x2E, points + MAX_DIGITS), *to_exponent],
        [(0x2B, 0x2B, sign), (0x2D, 0x2D, sign), digits(ones)],
        [digits(ones)],
        [digits(tens)],
        [],
    ]
    for n in range(1, MAX_DIGITS + 1):
        more = [(0x2E, 0x2E, points + MAX_DIGITS - n), digits(whole + n)] if n < MAX_DIGITS else []
        rows.append([*more, *to_exponent])
    rows += [[*([digits(left + n - 1)] if n else []), *to_exponent] for n in range(MAX_DIGITS + 1)]
    rows += [[digits(left + n - 1)] if n else [] for n in range(MAX_DIGITS + 1)]
    accepting = {zero, ones, tens, *range(whole, points)}
    return nodes.Automaton.of(rows, accepting).with_source(FLOAT)


def _multiples(steps: tuple[Decimal, ...], integer: bool, num_whole: int | None = None) -> Node:
    """Decimals of few enough places, or an automaton that reads the number modulo the common multiple of `steps`.

    num_whole  at most so many digits before the point
    """
    modulus, places = _modulus(steps, integer)
    if modulus == 1 and places <= MAX_DIGITS:  # each nests in the one before
        return _decimals(None if integer else places, num_whole)
    if modulus * (places + 1) > MAX_RESIDUES:
        raise GrammarError(
            f"multipleOf {', '.join(map(str, steps))} needs {modulus * (places + 1):,} states, the limit is "
            f"{MAX_RESIDUES:,}; use a smaller or rounder step"
        )
    return _residue_automaton(modulus, places, not integer, num_whole)


def _decimals(places: int | None, num_whole: int | None) -> Node:
    """Numbers with at most `places` digits after the point, and zeros after those; without a point where that is None.

    The digits after the point are no counted repeat, which would take a counter.
    """
    most = None if num_whole is None else num_whole - 1
    whole = nodes.alternation(ZERO, nodes.concat(NONZERO, nodes.repeat(DIGIT, 0, most)))
    digits = nodes.concat(DIGIT if places else ZERO, nodes.star(ZERO))
    for _ in range((places or 1) - 1):
        digits = nodes.concat(DIGIT, nodes.optional(digits))
    fraction = EMPTY if places is None else nodes.optional(nodes.concat(POINT, digits))
    return nodes.concat(nodes.optional(nodes.literal("-")), whole, fraction)


def _modulus(steps: tuple[Decimal, ...], integer: bool = False) -> tuple[int, int]:
    """What a multiple of all `steps` is a multiple of, once its point is moved by so many places."""
    fractions = [Fraction(step) for step in steps]
    if integer:
        fractions.append(Fraction(1))
    places = 0
    while any((step * 10**places).denominator != 1 for step in fractions):
        places += 1
    modulus = lcm(*(int(step * 10**places) for step in fractions))
    # a factor that every multiple has as decimal places needs none: 1 and 10 are the same with places 0 and 1
    while places and modulus % 10 == 0:
        modulus, places = modulus // 10, places - 1
    return modulus, places


def _residue_automaton(modulus: int, places: int, with_point: bool, num_whole: int | None) -> Node:
    """Numbers whose value times 10**places is a multiple of `modulus`; `num_whole` as in `_multiples`."""
    point, zero_code = 0x2E, 0x30
    # the last number counts the digits: those before the point where there is a limit, then those after it
    names: dict[tuple[str, int, int], int] = {("start", 0, 0): 0}
    rows: list[list[tuple[int, int, int]]] = [[]]
    accepting: set[int] = set()
    work = [("start", 0, 0)]
    first = 0 if num_whole is None else 1

    def state(kind: str, residue: int, count: int) -> int:
        key = (kind, residue, count)
        if key not in names:
            names[key] = len(rows)
            rows.append([])
            work.append(key)
            place = count if kind in ("part", "rest") else 0
            is_multiple = residue * 10 ** (places - place) % modulus == 0
            if kind in ("zero", "whole", "part", "rest") and is_multiple:
                accepting.add(names[key])
        return names[key]

    while work:
        kind, residue, count = key = work.pop()
        row = rows[names[key]]
        if kind in ("start", "minus"):
            if kind == "start":
                row.append((0x2D, 0x2D, state("minus", 0, 0)))
            row.append((zero_code, zero_code, state("zero", 0, 0)))
            row += [(zero_code + d, zero_code + d, state("whole", d % modulus, first)) for d in range(1, 10)]
            continue
        if kind == "whole" and (num_whole is None or count < num_whole):
            row += [
                (zero_code + d, zero_code + d, state("whole", (residue * 10 + d) % modulus, count + first))
                for d in range(10)
            ]
        if kind in ("zero", "whole") and with_point:
            row.append((point, point, state("point", residue, 0)))
        if kind in ("point", "part") and count < places:
            row += [
                (zero_code + d, zero_code + d, state("part", (residue * 10 + d) % modulus, count + 1))
                for d in range(10)
            ]
        elif kind in ("point", "part", "rest"):
            row.append((zero_code, zero_code, state("rest", residue, places)))
    return nodes.Automaton.of(map(sorted, rows), accepting)
