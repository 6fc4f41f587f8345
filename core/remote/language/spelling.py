"""Canonical JSON: respell values with other blanks, escapes or member order in the form that a grammar allows.

An endpoint enforces a schema in its own spelling: members in any order, `\\u00e9` for é, `1.0` for an integer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

_MOST_DIGITS = 18  # digits of an integer to which an exponent is expanded, as 1E2 to 100
_BLANKS_OUTSIDE_STRINGS = re.compile(r'("(?:[^"\\]|\\.)*(?:"|\\?$))|[ \t\r\n]{2,}', re.DOTALL)


def member_order(schema: Any) -> dict[str, int]:
    """Return the rank of each member name that a schema declares, in the order of first declaration."""
    order: dict[str, int] = {}
    for name in _declared(schema):
        order.setdefault(name, len(order))
    return order


def respelled(text: str, order: Mapping[str, int]) -> tuple[str, int] | None:
    """Return the value at the start of `text`, written compactly with its members in `order`, and its end in `text`.

    None if `text` does not begin with JSON, or an object in it has a name twice.
    """
    try:
        value, end = _DECODER.raw_decode(text)
        return _written(value, order), end
    except (ValueError, RecursionError):
        return None


def with_single_blanks(text: str) -> str:
    """Replace each run of blanks and line breaks between JSON tokens by one space."""
    return _BLANKS_OUTSIDE_STRINGS.sub(lambda found: found[1] or " ", text)


class _Number(str):
    """A number in its canonical spelling."""

    __slots__ = ()


def _declared(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        for word, inside in schema.items():
            if word == "properties" and isinstance(inside, dict):
                yield from inside
            yield from _declared(inside)
    elif isinstance(schema, list):
        for inside in schema:
            yield from _declared(inside)


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("a name occurs twice")
    return members


def _integer(digits: str) -> _Number:
    return _Number("0" if digits == "-0" else digits)


def _decimal(digits: str) -> _Number:
    number = Decimal(digits)
    is_whole = number.adjusted() < _MOST_DIGITS and number == number.to_integral_value()
    return _Number(int(number) if is_whole else digits)


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_members, parse_int=_integer, parse_float=_decimal, parse_constant=_no_number
)


def _written(value: Any, order: Mapping[str, int]) -> str:
    if isinstance(value, dict):
        names = sorted(value, key=lambda name: order.get(name, len(order)))
        return "{" + ",".join(f"{_quoted(name)}:{_written(value[name], order)}" for name in names) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_written(item, order) for item in value) + "]"
    if isinstance(value, _Number):
        return value
    return _quoted(value)


def _quoted(value: str | bool | None) -> str:
    return json.dumps(value, ensure_ascii=False)
