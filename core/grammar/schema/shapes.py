"""What a JSON schema means, one type at a time: the values that it admits, without its keywords."""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal


@dataclass(frozen=True)
class Anything:
    """Every JSON value."""


@dataclass(frozen=True)
class Union:
    """Any of the alternatives. Without one, nothing at all."""

    alternatives: tuple[Shape, ...]


@dataclass(frozen=True)
class ExactlyOne:
    """One of the alternatives and none of the others.

    pointer  where the schema has it
    rivals   what a value must not match beside its alternative, where that is more than the alternatives: keywords
             that narrow them afterwards do not make them exclude each other
    """

    alternatives: tuple[Shape, ...]
    pointer: str = field(default="", compare=False)
    rivals: tuple[Shape, ...] | None = None

    @property
    def excluded(self) -> tuple[Shape, ...]:
        return self.alternatives if self.rivals is None else self.rivals


@dataclass(frozen=True)
class Reference:
    """The shape of the schema at `target`, read when it is needed, so that it may contain itself."""

    target: str


@dataclass(frozen=True)
class Literals:
    """One of these values, each as compact JSON text."""

    texts: tuple[str, ...]


@dataclass(frozen=True)
class Null:
    """null"""


@dataclass(frozen=True)
class Boolean:
    """true or false"""


ANYTHING = Anything()
NOTHING = Union(())


@dataclass(frozen=True)
class Number:
    """A number within bounds (None is none); `integer` keeps whole ones, `multiple_of` keeps multiples of each."""

    integer: bool = False
    minimum: Decimal | None = None
    maximum: Decimal | None = None
    exclusive_minimum: bool = False
    exclusive_maximum: bool = False
    multiple_of: tuple[Decimal, ...] = ()


@dataclass(frozen=True)
class Text:
    """A string of `min_length` to `max_length` characters that contains a match of each pattern and has each format."""

    min_length: int = 0
    max_length: int | None = None
    patterns: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()


@dataclass(frozen=True)
class Array:
    """Items by position, then `items` for the rest; `min_items` to `max_items` of them in all."""

    prefix: tuple[Shape, ...] = ()
    items: Shape = ANYTHING
    min_items: int = 0
    max_items: int | None = None


@dataclass(frozen=True)
class Object:
    """Members by name in this order, then any number whose names fit `patterns`, else `additional`.

    closed   whether the schema said what other members may be; where it did not, strict mode allows none.
    names    what every name must be, where the schema said so.
    pointer  where the schema has it.
    """

    properties: tuple[tuple[str, Shape], ...] = ()
    patterns: tuple[tuple[str, Shape], ...] = ()
    additional: Shape = ANYTHING
    required: tuple[str, ...] = ()
    min_properties: int = 0
    max_properties: int | None = None
    names: Shape | None = None
    closed: bool = False
    pointer: str = field(default="", compare=False)

    def property(self, name: str) -> Shape | None:
        return next((shape for key, shape in self.properties if key == name), None)


Shape = Anything | Union | ExactlyOne | Reference | Literals | Null | Boolean | Number | Text | Array | Object
EVERY_TYPE: tuple[Shape, ...] = (Null(), Boolean(), Number(), Text(), Array(), Object())


def union(*shapes: Shape) -> Shape:
    """Join shapes into one, flat, without repeats, in the order given."""
    flat: dict[Shape, None] = {}
    for shape in shapes:
        for part in shape.alternatives if isinstance(shape, Union) else (shape,):
            flat[part] = None
    if ANYTHING in flat:
        return ANYTHING
    return next(iter(flat)) if len(flat) == 1 else Union(tuple(flat))
