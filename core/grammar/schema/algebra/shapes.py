"""Shapes: a JSON schema as sets of values, without the schema's keywords.

A shape is either of one type (Null to Object, and Literals) or put together from others: Union, Both, ExactlyOne, Not.
"""

from __future__ import annotations

from decimal import Decimal

from graftlm.core.grammar.schema.algebra.shared_shapes import SharedShape


class Anything(SharedShape):
    """Every JSON value."""


class Unkept(SharedShape):
    """What a keyword that cannot be kept would admit: unknown, so it and its complement are taken for everything."""


class Union(SharedShape):
    """Any of the alternatives. Without one, nothing at all."""

    alternatives: tuple[Shape, ...]


class Both(SharedShape):
    """All of the parts; at least two."""

    parts: tuple[Shape, ...]


class ExactlyOne(SharedShape):
    """One of the alternatives and none of the others."""

    alternatives: tuple[Shape, ...]


class Not(SharedShape):
    """Every JSON value but those of `shape`."""

    shape: Shape


class Reference(SharedShape):
    """The shape of the schema at `target`, read when it is needed, so that it may contain itself."""

    target: str


class Literals(SharedShape):
    """One of these values, each as compact JSON text."""

    texts: tuple[str, ...]


class Null(SharedShape):
    """null"""


class Boolean(SharedShape):
    """true or false"""


ANYTHING = Anything()
NOTHING = Union(())
UNKEPT = Unkept()


class Number(SharedShape):
    """A number within bounds (None is none), a multiple of each of `multiple_of` and of none of `no_multiple_of`.

    integer  only whole numbers, which are written without a fraction.
    one_spelling  unequal numbers have unequal texts: see `scalars.ONE_SPELLING`
    """

    integer: bool = False
    minimum: Decimal | None = None
    maximum: Decimal | None = None
    exclusive_minimum: bool = False
    exclusive_maximum: bool = False
    multiple_of: tuple[Decimal, ...] = ()
    no_multiple_of: tuple[Decimal, ...] = ()
    one_spelling: bool = False


class Text(SharedShape):
    """A string of `min_length` to `max_length` characters that contains a match of each pattern and has each format.

    The fields that begin with `no_` name what it must not match, have or be.
    """

    min_length: int = 0
    max_length: int | None = None
    patterns: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    no_patterns: tuple[str, ...] = ()
    no_formats: tuple[str, ...] = ()
    no_texts: tuple[str, ...] = ()


class Contains(SharedShape):
    """`least` to `most` items of an array have this shape; `most` None is without bound."""

    shape: Shape
    least: int = 1
    most: int | None = None


class Array(SharedShape):
    """Items by position, then `items` for the rest; `min_items` to `max_items` of them in all.

    unique  whether no two items may be equal.
    """

    prefix: tuple[Shape, ...] = ()
    items: Shape = ANYTHING
    min_items: int = 0
    max_items: int | None = None
    contains: tuple[Contains, ...] = ()
    unique: bool = False


class Object(SharedShape):
    """Members by name in this order, then any number whose names fit `patterns`, else `additional`.

    closed   whether the schema said what other members may be; where it did not, strict mode allows none.
    names    what every name must be, where the schema said so.
    empty    True if the schema has `properties` and lists none: strict mode allows no members then.
    """

    properties: tuple[tuple[str, Shape], ...] = ()
    patterns: tuple[tuple[str, Shape], ...] = ()
    additional: Shape = ANYTHING
    required: tuple[str, ...] = ()
    min_properties: int = 0
    max_properties: int | None = None
    names: Shape | None = None
    closed: bool = False
    empty: bool = False

    @property
    def listed(self) -> frozenset[str]:
        """The names that it declares or requires."""
        return frozenset(name for name, _ in self.properties) | frozenset(self.required)

    @property
    def counts_names(self) -> bool:
        """Whether it needs more members than the names it lists and one other, so that names must not repeat."""
        if self.min_properties < 2:
            return False
        has_others = self.additional != NOTHING or bool(self.patterns)
        return self.min_properties > len(self.listed) + has_others

    def property(self, name: str) -> Shape | None:
        if "_declared" not in self.__dict__:
            self.__dict__["_declared"] = dict(self.properties)
        declared: dict[str, Shape] = self.__dict__["_declared"]
        return declared.get(name)


class Implied(SharedShape):
    """A shape whose type strict mode takes from its keywords: the standard lets values of every other type have it too.

    What is written has `shape`; what is excluded (by `not`, `if`, `oneOf`) is what lacks it to the standard.
    """

    shape: Shape


Shape = (
    Anything
    | Unkept
    | Union
    | Both
    | ExactlyOne
    | Not
    | Reference
    | Literals
    | Null
    | Boolean
    | Number
    | Text
    | Array
    | Object
    | Implied
)
EVERY_TYPE: tuple[Shape, ...] = (Null(), Boolean(), Number(), Text(), Array(), Object())


def union(*shapes: Shape) -> Shape:
    """Join shapes into one, flat, without repeats, in the order given."""
    if len(shapes) == 1:
        return shapes[0]
    flat: dict[Shape, None] = {}
    for shape in shapes:
        if isinstance(shape, Union):
            for part in shape.alternatives:
                flat[part] = None
        else:
            flat[shape] = None
    if ANYTHING in flat:
        return ANYTHING
    return next(iter(flat)) if len(flat) == 1 else Union(tuple(flat))


def both(*shapes: Shape) -> Shape:
    """The values in all of the shapes: flat, without repeats, in the order given."""
    if len(shapes) == 1:
        return shapes[0]
    flat: dict[Shape, None] = {}
    for shape in shapes:
        if isinstance(shape, Both):
            for part in shape.parts:
                flat[part] = None
        else:
            flat[shape] = None
    if NOTHING in flat:
        return NOTHING
    flat.pop(ANYTHING, None)
    if not flat:
        return ANYTHING
    return next(iter(flat)) if len(flat) == 1 else Both(tuple(flat))


def negation(shape: Shape) -> Shape:
    """Every value but those of `shape`."""
    match shape:
        case Anything():
            return NOTHING
        case Union(()):
            return ANYTHING
        case Not(inner):
            return inner
        case Unkept():
            return shape
        case _:
            return Not(shape)


def item_at(shape: Array, index: int) -> Shape:
    """What the item at `index` must be."""
    return shape.prefix[index] if index < len(shape.prefix) else shape.items
