"""The values of items that must differ: whether they are many, or an automaton counts them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from itertools import islice, product
from math import prod

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.budget import check
from graftlm.core.grammar.node_texts import MOST_TEXTS
from graftlm.core.grammar.schema.algebra.kinds import KindsBehind, tells_kinds_apart
from graftlm.core.grammar.schema.algebra.shape_algebra import ShapeAlgebra
from graftlm.core.grammar.schema.algebra.shapes import (
    ANYTHING,
    NOTHING,
    Anything,
    Array,
    Both,
    ExactlyOne,
    Implied,
    Literals,
    Number,
    Object,
    Reference,
    Shape,
    Text,
    Union,
    both,
)
from graftlm.core.grammar.schema.spelling import one_spelling

_MAX_DEPTH = 12
"""Objects, arrays and references inside one another that are looked at for a member with many values."""
_MAX_REFERENCES = 30
_MANY_CHARACTERS = 3
_MAX_WAYS = 64
"""Ways to have several shapes at once that are looked at for one with many values."""

_UNRESTRICTED: dict[type, Shape] = {Text: Text(), Number: Number(), Array: Array()}


class ItemValues:
    """How many values shapes have, as far as that shows without their automata.

    closed  gives the parts of an object without the members that strict mode leaves out

    An answer is for certain: where it is not known, values are neither counted nor many.
    """

    def __init__(self, algebra: ShapeAlgebra, closed: Callable[[tuple[Shape, ...]], tuple[Shape, ...]]) -> None:
        self._algebra = algebra
        self._closed = closed
        self._answers: dict[tuple[str, str, int], bool] = {}
        self.kinds = KindsBehind(algebra.resolve, standard=False)

    def are_counted(self, shape: Shape, depth: int = 0) -> bool:
        """Whether it is certain that an automaton has the texts of `shape`: each of them, and one for each value."""
        if not depth and not self.kinds(shape) & {"array", "object"}:
            return True
        match shape:
            case Literals(texts):
                inner = [text for text in texts if depth or text[0] in "[{"]
                return len({one_spelling(text.encode()) for text in inner}) == len(inner)
            case Number(integer):
                return integer or self.are_many(shape)
            case Reference():
                return depth < _MAX_DEPTH and self._followed(self.are_counted, shape, depth + 1)
            case Implied(inner):
                return self.are_counted(inner, depth)
            case Union(parts):
                return all(self.are_counted(part, depth) for part in parts)
            case Array():
                is_plain = not shape.unique and not shape.contains and not shape.prefix
                return is_plain and depth < _MAX_DEPTH and self.are_counted(shape.items, depth + 1)
            case Object():
                is_plain = self._is_closed(shape) and not shape.patterns and not shape.min_properties
                items = [item for _, item in shape.properties]
                return is_plain and depth < _MAX_DEPTH and all(self.are_counted(item, depth + 1) for item in items)
            case _:
                return not self.kinds(shape) & {"array", "object", "number"}

    def are_many(self, shape: Shape, depth: int = 0) -> bool:
        """Whether it is certain that values of this shape are many."""
        match shape:
            case Anything():
                return True
            case Reference():
                return depth < _MAX_DEPTH and self._followed(self.are_many, shape, depth + 1)
            case Implied(inner):
                return self.are_many(inner, depth)
            case Union(parts):
                return any(self.are_many(part, depth) for part in parts)
            case ExactlyOne(parts):
                return tells_kinds_apart(parts, self.kinds) and any(self.are_many(part, depth) for part in parts)
            case Text(low, high):
                return shape == Text(low, high) and (high is None or high >= max(_MANY_CHARACTERS, low))
            case Number():
                return _are_many_numbers(shape)
            case Array():
                is_plain = not shape.unique and not shape.contains and not shape.prefix and shape.max_items != 0
                return is_plain and depth < _MAX_DEPTH and self.are_many(shape.items, depth + 1)
            case Object():
                return self._some_member([shape], depth) and not self._is_nothing(shape)
            case Both():
                return depth < _MAX_DEPTH and any(
                    self._are_many_at_once(way, depth) for way in islice(self._ways(shape, 0), _MAX_WAYS)
                )
            case _:
                return False

    def are_at_least(self, shape: Shape, number: int) -> bool:
        """Whether there surely are so many values of this shape."""
        return self.are_many(shape) or self._least(shape, 0) >= number

    def _least(self, shape: Shape, depth: int) -> int:
        """So many values there are at least; of many not all are counted."""
        if depth > _MAX_DEPTH or self._is_nothing(shape):
            return 0
        if not self.kinds(shape) & {"array", "object"}:
            few = self._algebra.few_values.of(shape)
            return MOST_TEXTS if few is None else len(few)
        match shape:
            case Literals():
                return len(self._algebra.few_values.of(shape) or ())
            case Reference():
                return self._least(self._resolved(shape), depth + 1)
            case Implied(inner):
                return self._least(inner, depth)
            case Union(parts):
                return max((self._least(part, depth + 1) for part in parts), default=0)
            case Array() if not shape.unique and not shape.contains and not shape.prefix and shape.max_items != 0:
                return self._least(shape.items, depth + 1) + (not shape.min_items)
            case Object() if shape.names is None and shape.max_properties is None and not shape.min_properties:
                counts = [
                    self._least(item, depth + 1) + (name not in shape.required) for name, item in shape.properties
                ]
                return min(prod(counts), MOST_TEXTS)
            case _:
                return 1

    def _followed(self, asks: Callable[[Shape, int], bool], shape: Reference, depth: int) -> bool:
        """What `asks` says of the target of `shape`: once for each depth, as definitions may refer to each other."""
        key = (asks.__name__, shape.target, depth)
        if key not in self._answers:
            check()
            self._answers[key] = asks(self._resolved(shape), depth)
        return self._answers[key]

    def _ways(self, shape: Shape, depth: int) -> Iterator[tuple[Shape, ...]]:
        """Ways to have `shape`, each as what holds at once."""
        check()
        match shape:
            case Reference() if depth < _MAX_DEPTH:
                yield from self._ways(self._resolved(shape), depth + 1)
            case Implied(inner):
                yield from self._ways(inner, depth)
            case Union(parts) if depth < _MAX_DEPTH:
                for part in parts:
                    yield from self._ways(part, depth + 1)
            case Both(parts) if depth < _MAX_DEPTH:
                found = [list(islice(self._ways(part, depth + 1), _MAX_WAYS)) for part in parts]
                for way in product(*found):
                    yield tuple(dict.fromkeys(part for parts in way for part in parts if part != ANYTHING))
            case _:
                yield (shape,)

    def _are_many_at_once(self, way: tuple[Shape, ...], depth: int) -> bool:
        """Whether the values that have all of these shapes, none of which has alternatives, are many for certain."""
        if len(way) < 2:
            return self.are_many(way[0] if way else ANYTHING, depth)
        if len(set(map(type, way))) > 1:
            return False
        objects = [part for part in way if isinstance(part, Object)]
        if objects:
            return self._some_member(objects, depth) and not self._is_nothing(both(*way))
        if type(way[0]) not in _UNRESTRICTED:
            return False
        restricting = [part for part in way if part != _UNRESTRICTED[type(part)]]
        return len(restricting) < 2 and self.are_many(restricting[0] if restricting else way[0], depth)

    def _some_member(self, objects: list[Object], depth: int) -> bool:
        """Whether what is all of `objects` may have a member with many values, or of many names."""
        if depth >= _MAX_DEPTH or any(part.max_properties is not None or part.names is not None for part in objects):
            return False
        if not any(self._is_closed(part) for part in objects) and all(part.additional == ANYTHING for part in objects):
            return True
        for part in objects:
            others = [other for other in objects if other is not part]
            for name, item in part.properties:
                alone = all(
                    other.property(name) is None and other.additional == ANYTHING and not other.patterns
                    for other in others
                )
                if alone and self.are_many(item, depth + 1):
                    return True
        return False

    def _is_closed(self, shape: Object) -> bool:
        (whole,) = self._closed((shape,))
        assert isinstance(whole, Object)
        return whole.max_properties == 0 or whole.additional == NOTHING

    def _is_nothing(self, shape: Shape) -> bool:
        try:
            return self._algebra.is_nothing(shape)
        except GrammarError:  # not known: taken for what has the fewest values
            return True

    def _resolved(self, shape: Shape) -> Shape:
        for _ in range(_MAX_REFERENCES):
            if not isinstance(shape, Reference):
                break
            shape = self._algebra.resolve(shape.target)
        return shape


def _are_many_numbers(shape: Number) -> bool:
    low, high = shape.minimum, shape.maximum
    if low is None or high is None:
        return shape == Number(shape.integer, minimum=low, maximum=high)
    is_plain = not shape.integer and not shape.multiple_of and not shape.no_multiple_of
    return is_plain and 2 * (high - low) >= max(Decimal(1), abs(low), abs(high))


def items_of(arrays: Iterable[Array]) -> Shape:
    """What items behind all prefixes are in arrays that have all these shapes."""
    return both(*(part.items for part in arrays))
