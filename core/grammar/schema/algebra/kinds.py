"""The kinds of JSON values, with true and false apart, and which of them a shape may have."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from graftlm.core.grammar.budget import check
from graftlm.core.grammar.schema.algebra.shapes import (
    NOTHING,
    Array,
    Boolean,
    Both,
    ExactlyOne,
    Implied,
    Literals,
    Null,
    Number,
    Object,
    Reference,
    Shape,
    Text,
    Union,
)

KINDS = ("null", "true", "false", "number", "string", "array", "object")
_EVERY = frozenset(KINDS)
KINDS_OF: dict[type, tuple[str, ...]] = {
    Null: ("null",),
    Boolean: ("true", "false"),
    Number: ("number",),
    Text: ("string",),
    Array: ("array",),
    Object: ("object",),
}


def kind_of_text(text: str) -> str:
    """The kind of the value with this JSON text."""
    return {'"': "string", "[": "array", "{": "object", "n": "null", "t": "true", "f": "false"}.get(text[0], "number")


def possible_kinds(shape: Shape) -> tuple[str, ...]:
    """The kinds that values of a shape may have, at a first look."""
    found: tuple[str, ...] | None = KINDS_OF.get(type(shape)) or shape.__dict__.get("_kinds")
    if found is None:  # kept with the shape, as long as that is in use
        found = shape.__dict__["_kinds"] = _look_at(shape)
    return found


def _look_at(shape: Shape) -> tuple[str, ...]:
    match shape:
        case Both(parts):
            found = [possible_kinds(part) for part in parts]
            return tuple([kind for kind in KINDS if all([kind in kinds for kinds in found])])
        case Union(parts):
            joined = {kind for part in parts for kind in possible_kinds(part)}
            return tuple([kind for kind in KINDS if kind in joined])
        case Literals(texts):
            return tuple({kind_of_text(text) for text in texts})
        case _:
            return KINDS


class KindsBehind:
    """The kinds that values of a shape may have, behind references too.

    resolve      reads the target of a reference
    standard     whether implied types count for nothing
    met_implied  whether an implied type was met
    """

    def __init__(self, resolve: Callable[[str], Shape], *, standard: bool) -> None:
        self._resolve = resolve
        self._standard = standard
        self._known: dict[Shape, frozenset[str]] = {}
        self.met_implied = False

    def __call__(self, shape: Shape) -> frozenset[str]:
        found = self._known.get(shape)
        if found is None:
            self._known[shape] = _EVERY  # of what contains itself
            found = self._known[shape] = self._look_at(shape)
        return found

    def _look_at(self, shape: Shape) -> frozenset[str]:
        match shape:
            case Reference(target):
                return self(self._resolve(target))
            case Union(parts) | ExactlyOne(parts):
                return frozenset[str]().union(*map(self, parts))
            case Both(parts):
                return _EVERY.intersection(*map(self, parts))
            case Implied(inner):
                self.met_implied = True
                return _EVERY if self._standard else self(inner)
            case _:
                return frozenset(possible_kinds(shape))


def tells_kinds_apart(parts: Iterable[Shape], kinds_of: Callable[[Shape], Collection[str]] = possible_kinds) -> bool:
    """Whether at most one of the alternatives is an array, and one an object."""
    has_array = has_object = False
    for part in parts:
        kinds = kinds_of(part)
        is_array, is_object = "array" in kinds, "object" in kinds
        if (is_array and has_array) or (is_object and has_object):
            return False
        has_array, has_object = has_array or is_array, has_object or is_object
    return True


def plainly_apart(a: Shape, b: Shape) -> bool:
    """Whether it shows at a glance that no value has both shapes: other kinds, strings or constants inside."""
    match a, b:
        case Literals(texts), Literals(others) if all(text[0] == '"' for text in texts):
            return not set(texts) & set(others)
        case Object(), Object():
            return _lacks_needed(a, b) or _lacks_needed(b, a)
    return not set(possible_kinds(a)) & set(possible_kinds(b))


def objects_apart(a: Shape, b: Shape) -> bool:
    """Whether the same shows of two shapes of objects, also where strict mode takes their type from their keywords."""
    one, other = (shape.shape if isinstance(shape, Implied) else shape for shape in (a, b))
    return isinstance(one, Object) and isinstance(other, Object) and plainly_apart(one, other)


def _lacks_needed(a: Object, b: Object) -> bool:
    """Whether `a` needs a member that `b` forbids, or for which they name other constants."""
    closed = b.additional is NOTHING and not b.patterns
    for name in a.required:
        other = b.property(name)
        if other is NOTHING or (other is None and closed):
            return True
        one = a.property(name)
        if isinstance(one, Literals) and isinstance(other, Literals) and plainly_apart(one, other):
            return True
    return False


def pairs_to_compare(shapes: Sequence[Shape]) -> Iterator[tuple[int, int]]:
    """Pairs of places that may share a value: all but those of constants that differ, of which there may be thousands.

    -> (i, j) with i < j, in order
    """
    plain = [
        shape.texts if isinstance(shape, Literals) and all(map(_is_plain, shape.texts)) else () for shape in shapes
    ]
    holders: dict[str, list[int]] = {}
    for i, texts in enumerate(plain):
        for text in texts:
            holders.setdefault(text, []).append(i)
    others = [i for i, texts in enumerate(plain) if not texts]
    for i, texts in enumerate(plain):
        check()
        rivals = {j for text in texts for j in holders[text]}.union(others) if texts else range(len(shapes))
        yield from ((i, j) for j in sorted(rivals) if j > i)


def _is_plain(text: str) -> bool:
    """Whether no other text has the value of this one: strings, whole numbers, true, false and null."""
    return text[0] in '"tfn' or text.isdecimal() or (text[0] == "-" and text[1:].isdecimal() and text != "-0")
