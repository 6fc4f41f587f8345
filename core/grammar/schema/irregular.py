"""Recognise schemas that no automaton holds, before anything is lowered."""

from __future__ import annotations

from collections.abc import Callable

from graftlm.core.grammar.schema.algebra.shapes import (
    ANYTHING,
    NOTHING,
    Anything,
    Array,
    Both,
    ExactlyOne,
    Implied,
    Not,
    Object,
    Reference,
    Shape,
    Union,
    Unkept,
)
from graftlm.core.grammar.schema.reading.json_schema import SchemaReader


def is_open(shape: Object) -> bool:
    """Whether a member of any name may have any value."""
    return shape.additional == ANYTHING and shape.names is None and shape.max_properties is None


def closed(parts: tuple[Shape, ...]) -> tuple[Shape, ...]:
    """`parts` of one object without members that none of them declares, unless one says something of others."""
    objects = [part for part in parts if isinstance(part, Object)]
    if len(parts) == len(objects) == 1:
        one = objects[0]
        if one.closed or not _declares(one):
            return parts
        sizes = one.min_properties, one.max_properties
        return (Object(one.properties, one.patterns, NOTHING, one.required, *sizes, one.names, True),)
    if any([part.closed for part in objects]) or not any([_declares(part) for part in objects]):
        return parts
    names = dict.fromkeys([name for part in objects for name, _ in part.properties])
    patterns = dict.fromkeys([pattern for part in objects for pattern, _ in part.patterns])
    closing = Object(
        properties=tuple((name, ANYTHING) for name in names),
        patterns=tuple((pattern, ANYTHING) for pattern in patterns),
        additional=NOTHING,
        closed=True,
    )
    return (*parts, closing)


def _declares(shape: Object) -> bool:
    return bool(shape.properties or shape.patterns or shape.empty)


class Irregular:
    """Whether a shape contains itself or any value, as far as can be told; where this is False, lowering has to show.

    Keywords that exclude each other may leave nothing of such a part. The schema is regular then, and counts as one
    that is not: a grammar with rules keeps it as well.
    """

    def __init__(self, reader: SchemaReader, close: Callable[[tuple[Shape, ...]], tuple[Shape, ...]]) -> None:
        self._reader = reader
        self._close = close
        self._known: dict[Shape, bool] = {}
        self.doubtful: list[Shape] = []
        """Parts met that combine others: only lowering shows whether they are regular."""

    def __call__(self, shape: Shape) -> bool:
        if shape not in self._known:
            self._known[shape] = True  # what contains itself
            self._known[shape] = self._judge(shape)
        return self._known[shape]

    def _judge(self, shape: Shape) -> bool:
        match shape:
            case Anything() | Unkept():
                return True
            case Reference(target):
                return self(self._reader.shape(target))
            case Implied(inner):
                return self(inner)
            case Union(parts) | ExactlyOne(parts):
                return any(map(self, parts))
            case Array(prefix, items, _, most):
                return most != 0 and any(map(self, (*prefix, items)))
            case Object():
                if is_open(shape):
                    (whole,) = self._close((shape,))
                    assert isinstance(whole, Object)
                    if is_open(whole):
                        return True
                return any(self(member) for _, member in (*shape.properties, *shape.patterns))
            case Both() | Not():
                self.doubtful.append(shape)
                return False
            case _:
                return False
