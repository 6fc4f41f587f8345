"""Numbers and strings that have several shapes and lack others, as a union of shapes of one kind."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from decimal import Decimal
from fractions import Fraction
from math import ceil
from typing import TypeVar

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.schema.algebra import text_language
from graftlm.core.grammar.schema.algebra.shapes import Literals, Not, Number, Shape, Text
from graftlm.core.grammar.schema.algebra.values import number_has, parse_value, same_value

Scalar = Number | Text | Literals
T = TypeVar("T")
MAX_PIECES = 2_000
_ANY_TEXT = Text()
ONE_SPELLING = r"0|-?[1-9][0-9]{0,14}|-?(0|[1-9][0-9]{0,8})\.[0-9]{0,5}[1-9]"
"""Numbers of 15 digits without an exponent, "-0" and zeros at the end of a fraction: unequal texts, unequal float64."""


def meet(parts: Iterable[Shape], free: Number | Text) -> list[Scalar]:
    """The values of the kind of `free` that each of `parts` admits: Number, Text, Literals of that kind, Not of these.

    The pieces together are exactly those values; a piece may be empty.
    """
    found: list[Scalar] = [free]
    for part in parts:
        found = [piece for one in found for piece in both(one, part)]
        if len(found) > MAX_PIECES:
            raise GrammarError(
                f"the combination has more than {MAX_PIECES:,} alternatives; nest fewer anyOf and not under allOf"
            )
    return found


def both(one: Scalar, part: Shape) -> list[Scalar]:
    """The values of `one` that `part` admits, of the same kind."""
    return [piece for piece in _meet(one, part) if not certainly_empty(piece)]


def certainly_empty(piece: Scalar) -> bool:
    """Whether it is certain that no value has this shape."""
    match piece:
        case Literals(texts):
            return not texts
        case Number():
            return _no_number(piece)
        case Text():
            return text_language.is_empty(piece)


def _meet(one: Scalar, part: Shape) -> Iterator[Scalar]:
    if isinstance(one, Literals):
        yield Literals(tuple(text for text in one.texts if _has(part, text)))
    elif isinstance(part, Literals):
        yield Literals(tuple(text for text in part.texts if _has(one, text)))
    elif isinstance(part, Not):
        for piece in _complement(part.shape):
            yield from _meet(one, piece)
    elif isinstance(one, Number) and isinstance(part, Number):
        yield _both_numbers(one, part)
    elif isinstance(one, Text) and isinstance(part, Text):
        yield _both_texts(one, part)


def _has(shape: Shape, text: str) -> bool:
    if isinstance(shape, Not):
        return not _has(shape.shape, text)
    value = parse_value(text)
    match shape:
        case Literals(texts) if isinstance(value, str):
            return text in texts  # each string has one text
        case Literals(texts):
            return any(same_value(parse_value(other), value) for other in texts)
        case Number():
            is_number = isinstance(value, (int, Decimal)) and not isinstance(value, bool)
            is_spelled = not shape.one_spelling or re.fullmatch(ONE_SPELLING, text) is not None
            return is_number and is_spelled and number_has(shape, value)
        case Text():
            return isinstance(value, str) and text_language.admits(shape, value)
        case _:
            raise AssertionError(shape)


def _complement(shape: Shape) -> Iterator[Scalar]:
    """The other values of the same kind."""
    match shape:
        case Number():
            if shape.minimum is not None:
                yield Number(maximum=shape.minimum, exclusive_maximum=not shape.exclusive_minimum)
            if shape.maximum is not None:
                yield Number(minimum=shape.maximum, exclusive_minimum=not shape.exclusive_maximum)
            for step in (*shape.multiple_of, *([Decimal(1)] if shape.integer else [])):
                yield Number(no_multiple_of=(step,))
            for step in shape.no_multiple_of:
                yield Number(multiple_of=(step,))
        case Text():
            if shape.min_length:
                yield Text(max_length=shape.min_length - 1)
            if shape.max_length is not None:
                yield Text(min_length=shape.max_length + 1)
            yield from (Text(no_patterns=(pattern,)) for pattern in shape.patterns)
            yield from (Text(no_formats=(name,)) for name in shape.formats)
            yield from (Text(patterns=(pattern,)) for pattern in shape.no_patterns)
            yield from (Text(formats=(name,)) for name in shape.no_formats)
            if shape.no_texts:
                yield Literals(shape.no_texts)
        case Literals(texts) if isinstance(parse_value(texts[0]), str):
            yield Text(no_texts=texts)
        case Literals(texts):
            values = sorted({Decimal(parse_value(text)) for text in texts})
            lows: list[Decimal | None] = [None, *values]
            for low, high in zip(lows, [*values, None], strict=True):
                yield Number(
                    minimum=low, maximum=high, exclusive_minimum=low is not None, exclusive_maximum=high is not None
                )


def _both_numbers(a: Number, b: Number) -> Number:
    low, high = a, a
    if b.minimum is not None and (
        a.minimum is None or (b.minimum, b.exclusive_minimum) > (a.minimum, a.exclusive_minimum)
    ):
        low = b
    if b.maximum is not None and (
        a.maximum is None or (b.maximum, not b.exclusive_maximum) < (a.maximum, not a.exclusive_maximum)
    ):
        high = b
    return Number(
        integer=a.integer or b.integer,
        minimum=low.minimum,
        maximum=high.maximum,
        exclusive_minimum=low.exclusive_minimum,
        exclusive_maximum=high.exclusive_maximum,
        multiple_of=_joined(a.multiple_of, b.multiple_of),
        no_multiple_of=_joined(a.no_multiple_of, b.no_multiple_of),
        one_spelling=a.one_spelling or b.one_spelling,
    )


def _both_texts(a: Text, b: Text) -> Text:
    if a is _ANY_TEXT:
        return b
    highs = [high for high in (a.max_length, b.max_length) if high is not None]
    return Text(
        max(a.min_length, b.min_length),
        min(highs, default=None),
        _joined(a.patterns, b.patterns),
        _joined(a.formats, b.formats),
        _joined(a.no_patterns, b.no_patterns),
        _joined(a.no_formats, b.no_formats),
        _joined(a.no_texts, b.no_texts),
    )


def _joined(a: tuple[T, ...], b: tuple[T, ...]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(a + b))


def _no_number(shape: Number) -> bool:
    steps = [Fraction(step) for step in (*shape.multiple_of, *([Decimal(1)] if shape.integer else []))]
    if any((step / Fraction(other)).denominator == 1 for step in steps for other in shape.no_multiple_of):
        return True
    low, high = shape.minimum, shape.maximum
    if low is None or high is None:
        return False
    if low > high or (low == high and (shape.exclusive_minimum or shape.exclusive_maximum)):
        return True
    return any(_no_multiple(step, shape, Fraction(low), Fraction(high)) for step in steps)


def _no_multiple(step: Fraction, shape: Number, low: Fraction, high: Fraction) -> bool:
    first = ceil(low / step)
    if shape.exclusive_minimum and first * step == low:
        first += 1
    return first * step > high or (shape.exclusive_maximum and first * step == high)
