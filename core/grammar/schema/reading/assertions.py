"""The keywords of one type as a shape, each checked for what a schema's author can get wrong."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import replace
from decimal import Decimal
from typing import Any

from graftlm.core.errors import GrammarError, shortened
from graftlm.core.grammar.schema.algebra.formats import INTEGER_RANGES
from graftlm.core.grammar.schema.algebra.shapes import (
    EVERY_TYPE,
    Implied,
    Number,
    Object,
    Reference,
    Shape,
    Union,
    both,
    negation,
    union,
)
from graftlm.core.grammar.schema.reading import keywords

Schema = Mapping[str, Any]


def types(schema: Schema, pointer: str, strict: bool) -> list[str]:
    """The types that a schema names or, without `type`, means."""
    given = schema["type"] if "type" in schema else keywords.implied_types(schema, strict)
    found = [given] if isinstance(given, str) else given
    if not isinstance(found, list) or not found:
        raise GrammarError(f"{pointer}/type: {given!r} is not a type", pointer=f"{pointer}/type")
    for name in found:
        if name not in keywords.TYPES:
            near = difflib.get_close_matches(str(name), keywords.TYPES, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(keywords.TYPES)}"
            raise GrammarError(f"{pointer}/type: unknown type {name!r}; {hint}", pointer=f"{pointer}/type")
    return found


def number(schema: Schema, pointer: str, integer: bool) -> Number:
    """The numeric keywords, and the ranges of OpenAPI's integer formats."""
    minimum, after = _bound(schema, "minimum", "exclusiveMinimum", pointer)
    maximum, before = _bound(schema, "maximum", "exclusiveMaximum", pointer)
    shape = Number(integer, minimum, maximum, after, before)
    if "multipleOf" in schema:
        step = _decimal(schema, "multipleOf", pointer)
        if step is None or step <= 0:
            raise GrammarError(f"{pointer}/multipleOf: {step} is not above 0", pointer=f"{pointer}/multipleOf")
        shape = replace(shape, multiple_of=(step,))
    _check_order(shape.minimum, shape.maximum, "minimum", "maximum", pointer)
    if integer and isinstance(schema.get("format"), str) and schema["format"] in INTEGER_RANGES:
        low, high = map(Decimal, INTEGER_RANGES[schema["format"]])
        if shape.minimum is None or shape.minimum < low:
            shape = replace(shape, minimum=low, exclusive_minimum=False)
        if shape.maximum is None or shape.maximum > high:
            shape = replace(shape, maximum=high, exclusive_maximum=False)
    return shape


def flag(schema: Schema, keyword: str, pointer: str) -> bool:
    """A keyword that is true or false; false where it is missing."""
    value = schema.get(keyword, False)
    if not isinstance(value, bool):
        where = f"{pointer}/{keyword}"
        raise GrammarError(f"{where}: {shortened(value)} is not true or false", pointer=where)
    return value


def lengths(schema: Schema, pointer: str) -> tuple[int, int | None]:
    """`minLength` and `maxLength`."""
    shortest, longest = count(schema, "minLength", pointer), count(schema, "maxLength", pointer)
    _check_order(shortest, longest, "minLength", "maxLength", pointer)
    return shortest or 0, longest


def counts(schema: Schema, pointer: str, noun: str) -> tuple[int, int | None]:
    """`minItems` and `maxItems`, or the same of `Properties`."""
    least, most = f"min{noun}", f"max{noun}"
    if least not in schema and most not in schema:
        return 0, None
    low, high = count(schema, least, pointer), count(schema, most, pointer)
    _check_order(low, high, least, most, pointer)
    return low or 0, high


_LONGEST = (1 << 31) - 1
"""More characters, items and members than any text that an engine can hold has."""


def count(schema: Schema, keyword: str, pointer: str) -> int | None:
    """A keyword whose value is a natural number (2.0 is one, too). An upper bound that no text reaches is none."""
    if keyword not in schema:
        return None
    value = schema[keyword]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0 or value != int(value):
        raise GrammarError(
            f"{pointer}/{keyword}: {value!r} is not a whole number of 0 or more", pointer=f"{pointer}/{keyword}"
        )
    if value < _LONGEST:
        return int(value)
    if keyword.startswith("max"):
        return None
    raise GrammarError(
        f"{pointer}/{keyword}: nothing can satisfy this: {keyword} ({value}) is beyond the longest text, "
        f"{_LONGEST:,}; lower it",
        pointer=f"{pointer}/{keyword}",
    )


def names(schema: Schema, keyword: str, pointer: str) -> tuple[str, ...]:
    """A keyword whose value is a list of property names."""
    if keyword not in schema:
        return ()
    value = schema[keyword]
    if not isinstance(value, list) or not all([isinstance(name, str) for name in value]):
        raise GrammarError(
            f"{pointer}/{keyword}: {value!r} is not a list of property names", pointer=f"{pointer}/{keyword}"
        )
    return tuple(dict.fromkeys(value))


_NO_MEMBERS: Schema = {}


def mapping(schema: Schema, keyword: str, pointer: str) -> Schema:
    """A keyword whose value is an object."""
    value = schema.get(keyword, _NO_MEMBERS)
    if not isinstance(value, dict):
        raise GrammarError(f"{pointer}/{keyword}: {value!r} is not an object", pointer=f"{pointer}/{keyword}")
    return value


def _bound(schema: Schema, keyword: str, exclusive: str, pointer: str) -> tuple[Decimal | None, bool]:
    """The tighter of an inclusive and an exclusive bound, and whether it is exclusive; draft 4 has a boolean there."""
    bound = _decimal(schema, keyword, pointer)
    if isinstance(schema.get(exclusive), bool):
        return bound, bound is not None and schema[exclusive]
    limit = _decimal(schema, exclusive, pointer)
    if limit is None or (bound is not None and (limit < bound if keyword == "minimum" else limit > bound)):
        return bound, False
    return limit, True


def _decimal(schema: Schema, keyword: str, pointer: str) -> Decimal | None:
    if keyword not in schema:
        return None
    value = schema[keyword]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise GrammarError(f"{pointer}/{keyword}: {value!r} is not a number", pointer=f"{pointer}/{keyword}")
    return Decimal(repr(value))


def _check_order(low: Decimal | int | None, high: Decimal | int | None, least: str, most: str, pointer: str) -> None:
    if low is not None and high is not None and low > high:
        raise GrammarError(
            f"{pointer or '/'}: nothing can satisfy this: {least} ({low}) is above {most} ({high})", pointer=pointer
        )


def schemas(schema: Schema, keyword: str, pointer: str) -> list[Any]:
    """The list that a keyword gives, which must not be empty."""
    items = schema[keyword]
    if not isinstance(items, list) or not items:
        raise GrammarError(
            f"{pointer}/{keyword}: {items!r} is not a list of schemas; give at least one",
            pointer=f"{pointer}/{keyword}",
        )
    return items


_SAYING_MOST = {"maxProperties", "type", "title", "description", "$comment", "default", "examples", "$id"}


def excluded(
    shape: Shape, schema_at: Callable[[str], Any], shape_at: Callable[[str], Shape], names_differ: bool
) -> Shape:
    """All values but those of `shape`, which a schema has under `not`.

    schema_at     reads the target of a reference
    shape_at      gives its shape
    names_differ  whether no object has a name twice, so that members can be counted: what lacks a `maxProperties`
                  asks for more of them
    """
    if names_differ:
        shape = union(*(_with_target(part, schema_at, shape_at) for part in _alternatives(shape)))
    parts = _alternatives(shape)
    if not names_differ or not any(map(_has_most, parts)):
        return negation(shape)
    return both(*(_with_more(part) if _has_most(part) else negation(part) for part in parts))


def _alternatives(shape: Shape) -> tuple[Shape, ...]:
    return shape.alternatives if isinstance(shape, Union) else (shape,)


def _with_target(part: Shape, schema_at: Callable[[str], Any], shape_at: Callable[[str], Shape]) -> Shape:
    """The shape that `part` refers to, if that says no more than `maxProperties`; else `part`."""
    if not isinstance(part, Reference):
        return part
    schema = schema_at(part.target)
    says_most = isinstance(schema, dict) and "maxProperties" in schema and schema.keys() <= _SAYING_MOST
    return shape_at(part.target) if says_most else part


def _has_most(shape: Shape) -> bool:
    """Whether nothing but `maxProperties` decides about an object of this shape."""
    inner = shape.shape if isinstance(shape, Implied) else shape
    return isinstance(inner, Object) and inner == Object(max_properties=inner.max_properties) != Object()


def _with_more(shape: Shape) -> Shape:
    """What lacks such a shape; to an implied one other types do not."""
    inner = shape.shape if isinstance(shape, Implied) else shape
    assert isinstance(inner, Object) and inner.max_properties is not None
    others = () if inner is not shape else (other for other in EVERY_TYPE if not isinstance(other, Object))
    return union(*others, Object(min_properties=inner.max_properties + 1))
