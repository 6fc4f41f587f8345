"""Intersect shapes, ask whether anything is left of one, and whether one admits a value."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from typing import Any

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.schema import text_language
from graftlm.core.grammar.schema.shapes import (
    ANYTHING,
    EVERY_TYPE,
    NOTHING,
    Anything,
    Array,
    Boolean,
    ExactlyOne,
    Literals,
    Null,
    Number,
    Object,
    Reference,
    Shape,
    Text,
    Union,
    union,
)

Resolve = Callable[[str], Shape]
MAX_ALTERNATIVES = 2_000


class ShapeAlgebra:
    """Set operations on shapes; `resolve` reads the target of a reference.

    Exact: a value is in `intersect(a, b)` when it is in both. `is_nothing` may say False of an empty
    shape, never True of one that admits a value.
    """

    def __init__(self, resolve: Resolve) -> None:
        self.resolve = resolve
        self._meeting: set[tuple[Shape, Shape]] = set()
        self._known_empty: dict[str, bool] = {}

    def intersect(self, a: Shape, b: Shape) -> Shape:
        """The values in both. Raises GrammarError where no finite shape says so."""
        if a == b or isinstance(b, Anything):
            return a
        if isinstance(a, Anything):
            return b
        if isinstance(a, Reference) or isinstance(b, Reference):
            return self._intersect_reference(a, b)
        if isinstance(a, Union) or isinstance(b, Union):
            return self._distribute(a, b)
        if isinstance(a, ExactlyOne):
            return self._narrow(a, b)
        if isinstance(b, ExactlyOne):
            return self._narrow(b, a)
        if isinstance(a, Literals):
            return self._filter(a, b)
        if isinstance(b, Literals):
            return self._filter(b, a)
        if isinstance(a, Number) and isinstance(b, Number):
            return _intersect_numbers(a, b)
        if isinstance(a, Text) and isinstance(b, Text):
            return _intersect_texts(a, b)
        if isinstance(a, Array) and isinstance(b, Array):
            return self._intersect_arrays(a, b)
        if isinstance(a, Object) and isinstance(b, Object):
            return self._intersect_objects(a, b)
        return NOTHING  # of different types; equal Null and Boolean met above

    def is_nothing(self, shape: Shape) -> bool:
        """Whether it is certain that no value has this shape."""
        match shape:
            case Union(alternatives) | ExactlyOne(alternatives):
                return all(self.is_nothing(part) for part in alternatives)
            case Literals(texts):
                return not texts
            case Reference(target):
                if target not in self._known_empty:
                    self._known_empty[target] = False  # what contains itself: not certain
                    self._known_empty[target] = self.is_nothing(self.resolve(target))
                return self._known_empty[target]
            case Number():
                return _no_number(shape)
            case Text():
                return text_language.is_empty(shape)
            case Array():
                return _crossed(shape.min_items, shape.max_items) or any(
                    self.is_nothing(shape.prefix[i] if i < len(shape.prefix) else shape.items)
                    for i in range(min(shape.min_items, len(shape.prefix) + 1))
                )
            case Object():
                return self._no_object(shape)
            case _:
                return False

    def admits(self, shape: Shape, value: Any) -> bool:
        """Whether `value` (as `json.loads` gives it, numbers as int or Decimal) has this shape."""
        match shape:
            case Anything():
                return True
            case Union(alternatives):
                return any(self.admits(part, value) for part in alternatives)
            case ExactlyOne():
                found = [i for i, part in enumerate(shape.excluded) if self.admits(part, value)]
                return len(found) == 1 and self.admits(shape.alternatives[found[0]], value)
            case Reference(target):
                return self.admits(self.resolve(target), value)
            case Literals(texts):
                return any(same_value(parse_value(text), value) for text in texts)
            case Null():
                return value is None
            case Boolean():
                return isinstance(value, bool)
            case Number():
                return isinstance(value, (int, Decimal)) and not isinstance(value, bool) and _has(shape, value)
            case Text():
                return isinstance(value, str) and text_language.admits(shape, value)
            case Array():
                return isinstance(value, list) and self._admits_array(shape, value)
            case Object():
                return isinstance(value, dict) and self._admits_object(shape, value)

    def with_rest(self, shape: Shape, rest: Shape) -> Shape:
        """Let members that nothing spoke of be `rest`, in each alternative."""
        match shape:
            case Reference(target):
                return self.with_rest(self.resolve(target), rest)
            case Union(alternatives):
                return union(*(self.with_rest(part, rest) for part in alternatives))
            case ExactlyOne(alternatives, pointer):
                narrowed = tuple(self.with_rest(part, rest) for part in alternatives)
                return ExactlyOne(narrowed, pointer, rivals=shape.excluded)
            case Object() if not shape.closed:
                return replace(shape, additional=rest, closed=True)
            case Anything():
                return union(*(self.with_rest(part, rest) for part in EVERY_TYPE))
            case _:
                return shape

    def member(self, shape: Object, name: str) -> Shape:
        """What the value of member `name` must be in `shape`; NOTHING where it may not occur."""
        if shape.names is not None and not self.admits(shape.names, name):
            return NOTHING
        declared = shape.property(name)
        if declared is not None:
            return declared  # reading a schema already met it with the patterns that its name fits
        fitting = [item for pattern, item in shape.patterns if text_language.contains(pattern, name)]
        if not fitting:
            return shape.additional
        result: Shape = ANYTHING
        for item in fitting:
            result = self.intersect(result, item)
        return result

    def _intersect_reference(self, a: Shape, b: Shape) -> Shape:
        if (a, b) in self._meeting:
            target = a.target if isinstance(a, Reference) else b.target if isinstance(b, Reference) else ""
            raise GrammarError(
                f"{target}: a definition that contains itself cannot be combined with other keywords; "
                "move the keywords beside its $ref into the definition",
                pointer=target.removeprefix("#"),
            )
        self._meeting.add((a, b))
        try:
            return self.intersect(
                self.resolve(a.target) if isinstance(a, Reference) else a,
                self.resolve(b.target) if isinstance(b, Reference) else b,
            )
        finally:
            self._meeting.discard((a, b))

    def _distribute(self, a: Shape, b: Shape) -> Shape:
        left = a.alternatives if isinstance(a, Union) else (a,)
        right = b.alternatives if isinstance(b, Union) else (b,)
        if len(left) * len(right) > MAX_ALTERNATIVES:
            raise GrammarError(
                f"combining {len(left)} with {len(right)} alternatives gives more than {MAX_ALTERNATIVES}; "
                "nest fewer anyOf under allOf"
            )
        parts = [self.intersect(x, y) for x in left for y in right]
        return union(*(part for part in parts if part != NOTHING))

    def _narrow(self, one: ExactlyOne, shape: Shape) -> Shape:
        alternatives = tuple(self.intersect(part, shape) for part in one.alternatives)
        rivals = None if one.rivals is None else tuple(self.intersect(part, shape) for part in one.rivals)
        return ExactlyOne(alternatives, one.pointer, rivals)

    def _filter(self, literals: Literals, shape: Shape) -> Shape:
        kept = tuple(text for text in literals.texts if self.admits(shape, parse_value(text)))
        return Literals(kept) if kept else NOTHING

    def _intersect_arrays(self, a: Array, b: Array) -> Array:
        length = max(len(a.prefix), len(b.prefix))
        return Array(
            prefix=tuple(self.intersect(_item(a, i), _item(b, i)) for i in range(length)),
            items=self.intersect(a.items, b.items),
            min_items=max(a.min_items, b.min_items),
            max_items=_least(a.max_items, b.max_items),
        )

    def _intersect_objects(self, a: Object, b: Object) -> Object:
        names = list(dict.fromkeys([name for name, _ in a.properties] + [name for name, _ in b.properties]))
        patterns, additional = self._intersect_patterns(a, b)
        if a.names is None or b.names is None:
            allowed = a.names if b.names is None else b.names
        else:
            allowed = self.intersect(a.names, b.names)
        return Object(
            properties=tuple((name, self.intersect(self.member(a, name), self.member(b, name))) for name in names),
            patterns=patterns,
            additional=additional,
            required=tuple(dict.fromkeys(a.required + b.required)),
            min_properties=max(a.min_properties, b.min_properties),
            max_properties=_least(a.max_properties, b.max_properties),
            names=allowed,
            closed=a.closed or b.closed,
            pointer=a.pointer or b.pointer,
        )

    def _intersect_patterns(self, a: Object, b: Object) -> tuple[tuple[tuple[str, Shape], ...], Shape]:
        if not b.patterns:
            return self._pattern_meets(a, b.additional)
        if not a.patterns:
            return self._pattern_meets(b, a.additional)
        if [p for p, _ in a.patterns] == [p for p, _ in b.patterns]:
            both = tuple((p, self.intersect(x, y)) for (p, x), (_, y) in zip(a.patterns, b.patterns, strict=True))
            return both, self.intersect(a.additional, b.additional)
        if a.additional == ANYTHING and b.additional == ANYTHING:
            return a.patterns + b.patterns, ANYTHING
        raise GrammarError(
            "allOf combines objects with different patternProperties of which one restricts additionalProperties; "
            "write the patterns into one object"
        )

    def _pattern_meets(self, shape: Object, additional: Shape) -> tuple[tuple[tuple[str, Shape], ...], Shape]:
        # a name that fits several patterns meets `additional` once for each: the same as once
        patterns = tuple((pattern, self.intersect(item, additional)) for pattern, item in shape.patterns)
        return patterns, self.intersect(shape.additional, additional)

    def _no_object(self, shape: Object) -> bool:
        if _crossed(shape.min_properties, shape.max_properties):
            return True
        if shape.max_properties is not None and len(shape.required) > shape.max_properties:
            return True
        return any(self.is_nothing(self.member(shape, name)) for name in shape.required)

    def _admits_array(self, shape: Array, value: list[Any]) -> bool:
        if len(value) < shape.min_items or (shape.max_items is not None and len(value) > shape.max_items):
            return False
        return all(self.admits(_item(shape, i), item) for i, item in enumerate(value))

    def _admits_object(self, shape: Object, value: dict[str, Any]) -> bool:
        if len(value) < shape.min_properties or (
            shape.max_properties is not None and len(value) > shape.max_properties
        ):
            return False
        if any(name not in value for name in shape.required):
            return False
        return all(self.admits(self.member(shape, name), item) for name, item in value.items())


def parse_value(text: str) -> Any:
    """The value of JSON text, with numbers exact."""
    return json.loads(text, parse_float=Decimal)


def same_value(a: Any, b: Any) -> bool:
    """Equality as JSON Schema has it: 1 equals 1.0, true does not equal 1, the order of members is free."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(same_value(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_value(a[key], b[key]) for key in a)
    return bool(a == b)


def _item(shape: Array, index: int) -> Shape:
    return shape.prefix[index] if index < len(shape.prefix) else shape.items


def _least(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def _crossed(lowest: int, highest: int | None) -> bool:
    return highest is not None and lowest > highest


def _intersect_numbers(a: Number, b: Number) -> Number:
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
        multiple_of=tuple(dict.fromkeys(a.multiple_of + b.multiple_of)),
    )


def _intersect_texts(a: Text, b: Text) -> Text:
    return replace(
        a,
        min_length=max(a.min_length, b.min_length),
        max_length=_least(a.max_length, b.max_length),
        patterns=tuple(dict.fromkeys(a.patterns + b.patterns)),
        formats=tuple(dict.fromkeys(a.formats + b.formats)),
    )


def _no_number(shape: Number) -> bool:
    low, high = shape.minimum, shape.maximum
    if low is None or high is None:
        return False
    if low > high or (low == high and (shape.exclusive_minimum or shape.exclusive_maximum)):
        return True
    steps = [*shape.multiple_of, *([Decimal(1)] if shape.integer else [])]
    return any(_no_multiple(step, shape) for step in steps)


def _no_multiple(step: Decimal, shape: Number) -> bool:
    from fractions import Fraction
    from math import ceil

    assert shape.minimum is not None and shape.maximum is not None
    unit = Fraction(step)
    first = ceil(Fraction(shape.minimum) / unit)
    if shape.exclusive_minimum and first * unit == Fraction(shape.minimum):
        first += 1
    last = Fraction(shape.maximum)
    return first * unit > last or (shape.exclusive_maximum and first * unit == last)


def _has(shape: Number, value: int | Decimal) -> bool:
    from fractions import Fraction

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
    return all((number / Fraction(step)).denominator == 1 for step in shape.multiple_of)
