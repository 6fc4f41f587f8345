"""Few values: those of shapes that allow so few that items which must differ can run out."""

from __future__ import annotations

import math
from collections.abc import Callable

from graftlm.core.grammar.schema.algebra.kinds import kind_of_text
from graftlm.core.grammar.schema.algebra.needed_values import MAX_PLACES, num_different
from graftlm.core.grammar.schema.algebra.shapes import (
    Array,
    Boolean,
    Both,
    Literals,
    Null,
    Number,
    Reference,
    Shape,
    Union,
)
from graftlm.core.grammar.schema.item_language import as_read

Resolve = Callable[[str], Shape]

_MOST = 1_000
_DEEPEST = 20


def few_values(shape: Shape, resolve: Resolve, depth: int = 0) -> frozenset[str] | None:
    """Texts of which each stands for values that are equal, all of `shape` among them; None where they may be many."""
    if depth > _DEEPEST:
        return None
    match shape:
        case Null():
            return frozenset({"null"})
        case Boolean():
            return frozenset({"true", "false"})
        case Literals(texts):
            return frozenset(as_read(text) if kind_of_text(text) == "number" else text for text in texts)
        case Number():
            return _integers(shape)
        case Reference(target):
            return few_values(resolve(target), resolve, depth + 1)
        case Union(parts):
            found = [few_values(part, resolve, depth + 1) for part in parts]
            known = [values for values in found if values is not None]
            every: frozenset[str] = frozenset()
            return every.union(*known) if len(known) == len(found) else None
        case Both(parts):
            found = [few_values(part, resolve, depth + 1) for part in parts]
            return min((values for values in found if values is not None), key=len, default=None)
    return None


def _integers(shape: Number) -> frozenset[str] | None:
    if not shape.integer or shape.minimum is None or shape.maximum is None:
        return None
    low, high = math.ceil(shape.minimum), math.floor(shape.maximum)
    if high - low >= _MOST:
        return None
    kept = (
        value
        for value in range(low, high + 1)
        if not (shape.exclusive_minimum and value == shape.minimum)
        and not (shape.exclusive_maximum and value == shape.maximum)
        and all(value % divisor == 0 for divisor in shape.multiple_of)
    )
    return frozenset(map(str, kept))


def most_items(shape: Array, resolve: Resolve) -> int | None:
    """How many items an array has at most because they must differ; None where that is no limit.

    -1 where `contains` asks for more different items than there are.
    """
    if not shape.unique:
        return None
    for asked in shape.contains:
        values = few_values(asked.shape, resolve)
        if values is not None and len(values) < asked.least:
            return -1
    first = [few_values(item, resolve) for item in shape.prefix[: shape.min_items]]
    rest = few_values(shape.items, resolve)
    num_rest = min(shape.min_items, len(shape.prefix) + MAX_PLACES) - len(first)
    few = [values for values in (*first, *[rest] * num_rest) if values is not None]
    if num_different(few) < len(few):
        return max(0, shape.min_items - 1)
    values = few_values(Union((*shape.prefix, shape.items)), resolve)
    return None if values is None else len(values)
