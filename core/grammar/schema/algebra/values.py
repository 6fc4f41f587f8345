"""JSON values, with numbers exact: reading them, comparing them, and whether a number has a shape."""

from __future__ import annotations

import json
from collections.abc import Iterable
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any

from graftlm.core.grammar.schema.algebra.kinds import kind_of_text
from graftlm.core.grammar.schema.algebra.shapes import (
    ANYTHING,
    NOTHING,
    Array,
    Literals,
    Not,
    Number,
    Object,
    Shape,
    both,
    negation,
    union,
)

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def parse_value(text: str) -> Any:
    """The value of JSON text, with numbers exact."""
    return _scalar(text) if text[:1] not in "[{" else json.loads(text, parse_float=Decimal)


@lru_cache(maxsize=4096)
def _scalar(text: str) -> Any:
    return json.loads(text, parse_float=Decimal)


def compact(value: Any) -> str:
    """The JSON text of `value` without blanks."""
    return _encode(value)


def same_value(a: Any, b: Any) -> bool:
    """Equality as JSON Schema has it: 1 equals 1.0, true does not equal 1, the order of members is free."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(same_value(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_value(a[key], b[key]) for key in a)
    return bool(a == b)


def number_has(shape: Number, value: int | Decimal) -> bool:
    """Whether `value` has this shape."""
    number = Fraction(value)
    if shape.integer and number.denominator != 1:
        return False
    if shape.minimum is not None and (
        number < shape.minimum or (shape.exclusive_minimum and number == Fraction(shape.minimum))
    ):
        return False
    if shape.maximum is not None and (
        number > shape.maximum or (shape.exclusive_maximum and number == Fraction(shape.maximum))
    ):
        return False
    if any((number / Fraction(step)).denominator == 1 for step in shape.no_multiple_of):
        return False
    return all((number / Fraction(step)).denominator == 1 for step in shape.multiple_of)


def constant(text: str) -> Shape:
    """The array or object with the JSON text `text`, as a shape of its members; other values as Literals."""
    value = json.loads(text)
    if isinstance(value, list):
        items = tuple(constant(compact(item)) for item in value)
        return Array(prefix=items, min_items=len(items), max_items=len(items))
    if isinstance(value, dict):
        members = tuple((name, constant(compact(item))) for name, item in value.items())
        limit = len(members)
        return Object(properties=members, required=tuple(value), max_properties=limit, closed=True)
    return Literals((text,))


def kind_of(value: Any) -> str:
    """The kind of a value whose numbers are int or Decimal, as `shape_algebra.KINDS` names it."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case str():
            return "string"
        case list():
            return "array"
        case dict():
            return "object"
        case _:
            return "number"


def any_of(found: Iterable[bool | None]) -> bool | None:
    """Whether one is True; None where that is not known."""
    unknown: bool | None = False
    for one in found:
        if one:
            return True
        unknown = None if one is None else unknown
    return unknown


def all_of(found: Iterable[bool | None]) -> bool | None:
    """Whether none is False; None where that is not known."""
    unknown: bool | None = True
    for one in found:
        if one is False:
            return False
        unknown = None if one is None else unknown
    return unknown


def narrow_literals(texts: tuple[str, ...], kind: str, positive: bool) -> Shape:
    """The values of one kind among the constants `texts` or, unless `positive`, the others of that kind."""
    mine = tuple(text for text in texts if kind_of_text(text) == kind)
    if not mine:
        found: Shape = NOTHING
    elif kind in ("null", "true", "false"):
        found = ANYTHING
    elif kind in ("number", "string"):
        return Literals(mine) if positive else Not(Literals(mine))
    else:
        constants = [constant(text) for text in mine]
        return union(*constants) if positive else both(*map(Not, constants))
    return found if positive else negation(found)
