"""Few values: those of shapes that allow so few that items which must differ can run out."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from itertools import product
from typing import Any

from graftlm.core.grammar.schema.algebra.few_texts import few_texts
from graftlm.core.grammar.schema.algebra.kinds import kind_of_text
from graftlm.core.grammar.schema.algebra.needed_values import MAX_PLACES, num_different
from graftlm.core.grammar.schema.algebra.shapes import (
    NOTHING,
    Array,
    Boolean,
    Both,
    Literals,
    Null,
    Number,
    Object,
    Reference,
    Shape,
    Text,
    Union,
)
from graftlm.core.grammar.schema.algebra.values import parse_value
from graftlm.core.grammar.schema.distinct.item_language import as_read

_MOST_COMPARED = 100
"""Values that are compared with all of several shapes; of more some may have only one of them."""
_MOST_OBJECTS = 100
"""Objects that are written out; more count as many."""
_FLOATS = Decimal("1e300")
_MOST_NUMBERS = 1_000
"""Numbers within bounds that are written out; more count as many."""


class FewValues:
    """The values of shapes, each looked at once.

    resolve  reads the target of a reference
    admits   whether a value may have a shape
    """

    def __init__(self, resolve: Callable[[str], Shape], admits: Callable[[Shape, Any], bool]) -> None:
        self._resolve = resolve
        self._admits = admits
        self._known: dict[Shape, frozenset[str] | None] = {}

    def of(self, shape: Shape) -> frozenset[str] | None:
        """Texts, one for all values that are equal, with all of `shape` among them; None where there may be many."""
        if shape not in self._known:
            self._known[shape] = None  # of what contains itself there may be many
            self._known[shape] = self._find(shape)
        return self._known[shape]

    def lacks_contained(self, shape: Array) -> bool:
        """Whether `contains` asks an array whose items must differ for more of them than there are."""
        if not shape.unique:
            return False
        return any((values := self.of(one.shape)) is not None and len(values) < one.least for one in shape.contains)

    def is_short(self, shape: Array) -> bool:
        """Whether an array whose items must differ asks for more of them than there are."""
        most = self.most_items(shape)
        return self.lacks_contained(shape) or (most is not None and most < shape.min_items)

    def most_items(self, shape: Array) -> int | None:
        """How many items an array has at most because they must differ; None where that is no limit."""
        if not shape.unique:
            return None
        first = [self.of(item) for item in shape.prefix[: max(shape.min_items, MAX_PLACES)]]
        num_rest = max(0, min(shape.min_items - len(first), MAX_PLACES))
        few = [
            (place, values)
            for place, values in enumerate((*first, *[self.of(shape.items)] * num_rest))
            if values is not None
        ]
        num_apart = num_different([values for _, values in few])
        if num_apart < len(few):  # the next one has no value that those before it leave
            return few[num_apart][0]
        values = self.of(Union((*shape.prefix, shape.items)))
        return None if values is None else len(values)

    def _find(self, shape: Shape) -> frozenset[str] | None:
        match shape:
            case Null():
                return frozenset({"null"})
            case Boolean():
                return frozenset({"true", "false"})
            case Literals(texts):
                return frozenset(as_read(text) if kind_of_text(text) == "number" else text for text in texts)
            case Number():
                return _numbers(shape)
            case Reference(target):
                return self.of(self._resolve(target))
            case Union(parts):
                found = [self.of(part) for part in parts]
                known = [values for values in found if values is not None]
                every: frozenset[str] = frozenset()
                return every.union(*known) if len(known) == len(found) else None
            case Both(parts):
                few = min((values for part in parts if (values := self.of(part)) is not None), key=len, default=None)
                if few is None or len(few) > _MOST_COMPARED:
                    return few
                return frozenset(text for text in few if self._admits(shape, parse_value(text)))
            case Text():
                return few_texts(shape)
            case Array():
                return self._arrays(shape)
            case Object():
                return self._objects(shape)
        return None

    def _arrays(self, shape: Array) -> frozenset[str] | None:
        """Those of an array with an end: by `maxItems`, because its items differ, or as only its first ones may be."""
        listed = len(shape.prefix) if shape.items == NOTHING else None
        bounds = (shape.max_items, self.most_items(shape), listed)
        high = min((bound for bound in bounds if bound is not None), default=None)
        if high is None or high > _MOST_OBJECTS:
            return None
        found: set[str] = set()
        begun: list[tuple[str, ...]] = [()]
        for place in range(high + 1):
            if place >= shape.min_items:
                found.update("[" + ",".join(items) + "]" for items in begun)
            if place == high or not begun:
                break
            values = self.of(shape.prefix[place] if place < len(shape.prefix) else shape.items)
            if values is None:
                return None
            begun = [(*items, value) for items in begun for value in values if not (shape.unique and value in items)]
            if len(begun) + len(found) > _MOST_OBJECTS:
                return None
        return frozenset(found)

    def _objects(self, shape: Object) -> frozenset[str] | None:
        """Those of an object that has only members that it lists, or none."""
        if shape.max_properties == 0:
            return frozenset({"{}"})
        if shape.additional != NOTHING or shape.patterns:
            return None
        members: list[list[str]] = []
        for name, item in sorted(shape.properties):
            values = self.of(item)
            if values is None:
                return None
            ways = [f"{json.dumps(name)}:{value}" for value in values]
            members.append(ways if name in shape.required else [*ways, ""])
        if math.prod(map(len, members)) > _MOST_OBJECTS:
            return None
        return frozenset("{" + ",".join(filter(None, case)) + "}" for case in product(*members))


def _numbers(shape: Number) -> frozenset[str] | None:
    """Those between bounds that are whole, multiples of something, or one."""
    low, high = shape.minimum, shape.maximum
    if low is None or high is None or (not shape.integer and max(abs(low), abs(high)) > _FLOATS):
        return None
    step = Fraction(1 if shape.integer else max(shape.multiple_of, default=0))
    if not step:
        return frozenset({as_read(f"{low:f}")}) if low == high else None
    first, last = math.ceil(Fraction(low) / step), math.floor(Fraction(high) / step)
    if last - first >= _MOST_NUMBERS:
        return None
    values = (number * step for number in range(first, last + 1))
    kept = (
        value
        for value in values
        if not (shape.exclusive_minimum and value == low)
        and not (shape.exclusive_maximum and value == high)
        and all(value % Fraction(divisor) == 0 for divisor in shape.multiple_of)
    )
    return frozenset(str(value) if value.denominator == 1 else as_read(repr(float(value))) for value in kept)
