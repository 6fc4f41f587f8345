"""Membership of a value in a shape, and the shape of an object's member."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from itertools import combinations
from typing import Any

from graftlm.core.grammar.schema.algebra import text_language
from graftlm.core.grammar.schema.algebra.kinds import KINDS_OF
from graftlm.core.grammar.schema.algebra.shapes import (
    NOTHING,
    Anything,
    Array,
    Boolean,
    Both,
    ExactlyOne,
    Implied,
    Literals,
    Not,
    Null,
    Number,
    Object,
    Reference,
    Shape,
    Text,
    Union,
    Unkept,
    both,
    item_at,
)
from graftlm.core.grammar.schema.algebra.values import all_of, any_of, kind_of, number_has, parse_value, same_value


class Membership:
    """Membership of JSON values in shapes; `resolve` reads the target of a reference."""

    def __init__(self, resolve: Callable[[str], Shape]) -> None:
        self.resolve = resolve

    def member(self, shape: Object, name: str) -> Shape:
        """Return the shape of member `name` in `shape`; NOTHING where it may not occur."""
        if shape.names is not None and not self.admits(shape.names, name):
            return NOTHING
        declared = shape.property(name)
        if declared is not None:
            return declared  # reading a schema already combined it with the patterns that its name fits
        fitting = [item for pattern, item in shape.patterns if text_language.contains(pattern, name)]
        return both(*fitting) if fitting else shape.additional

    def admits(self, shape: Shape, value: Any) -> bool:
        """Return True if `value` (as `json.loads` gives it, numbers as int or Decimal) may have this shape."""
        return self._truth(shape, value) is not False

    def _truth(self, shape: Shape, value: Any) -> bool | None:
        """None where a keyword that cannot be kept decides."""
        match shape:
            case Anything():
                return True
            case Unkept():
                return None
            case Union(parts):
                return any_of(self._truth(part, value) for part in parts)
            case Both(parts):
                return all_of(self._truth(part, value) for part in parts)
            case Not(inner):
                found = self._truth(inner, value)
                return None if found is None else not found
            case ExactlyOne(parts):
                found_all = [self._truth(part, value) for part in parts]
                if found_all.count(True) > 1:
                    return False
                return None if None in found_all else True in found_all
            case Reference(target):
                return self._truth(self.resolve(target), value)
            case Literals(texts):
                return any(same_value(parse_value(text), value) for text in texts)
            case Implied(inner):
                return self._truth(inner, value) if KINDS_OF[type(inner)] == (kind_of(value),) else True
            case Null():
                return value is None
            case Boolean():
                return isinstance(value, bool)
            case Number():
                return isinstance(value, (int, Decimal)) and not isinstance(value, bool) and number_has(shape, value)
            case Text():
                return isinstance(value, str) and text_language.admits(shape, value)
            case Array():
                return isinstance(value, list) and self._array_has(shape, value)
            case Object():
                return isinstance(value, dict) and self._object_has(shape, value)

    def _array_has(self, shape: Array, value: list[Any]) -> bool | None:
        if len(value) < shape.min_items or (shape.max_items is not None and len(value) > shape.max_items):
            return False
        if shape.unique and any(same_value(a, b) for a, b in combinations(value, 2)):
            return False
        for wanted in shape.contains:
            found = [self._truth(wanted.shape, item) for item in value]
            least, most = found.count(True), len(found) - found.count(False)
            if most < wanted.least or (wanted.most is not None and least > wanted.most):
                return False
        return all_of(self._truth(item_at(shape, i), item) for i, item in enumerate(value))

    def _object_has(self, shape: Object, value: dict[str, Any]) -> bool | None:
        high = shape.max_properties
        if len(value) < shape.min_properties or (high is not None and len(value) > high):
            return False
        if any(name not in value for name in shape.required):
            return False
        return all_of(self._truth(self.member(shape, name), item) for name, item in value.items())
