"""Doubtful items: whether a schema may ask for items, or names, that differ more than its language shows.

Of most arrays with `uniqueItems` the language of an item tells how many there can be. Where it does not tell all, each
token has to be looked at for whether the text can still end after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from graftlm.core.grammar.budget import check
from graftlm.core.grammar.schema.algebra.kinds import KINDS, possible_kinds, tells_kinds_apart
from graftlm.core.grammar.schema.algebra.shapes import (
    ANYTHING,
    NOTHING,
    Anything,
    Array,
    Both,
    ExactlyOne,
    Implied,
    Literals,
    Not,
    Number,
    Object,
    Reference,
    Shape,
    Text,
    Union,
    both,
)
from graftlm.core.grammar.schema.member_names import counts_names
from graftlm.core.grammar.schema.reading.references import escape
from graftlm.core.grammar.spec import Issue, JsonSchema

Place: TypeAlias = tuple[tuple[Shape, bool], ...]
"""What the value at one place may have to be: shapes, and whether each holds in any case."""

_MAX_DEPTH = 12
"""Objects, arrays and references inside one another that are looked at for a member with many values."""
_MAX_REFERENCES = 30
_MANY_CHARACTERS = 3


class DoubtfulItems:
    """Whether items, or names, of `root` are doubtful.

    resolve  reads the target of a reference
    closed   gives the parts of an object without the members that strict mode leaves out
    """

    def __init__(
        self,
        root: Shape,
        resolve: Callable[[str], Shape],
        closed: Callable[[tuple[Shape, ...]], tuple[Shape, ...]],
    ) -> None:
        self._resolve = resolve
        self._closed = closed
        self._known_kinds: dict[Shape, frozenset[str]] = {}
        self._answers: dict[tuple[str, str, int], bool] = {}
        self._places: set[Place] = set()
        self._work: list[Place] = [((root, True),)]

    def found(self) -> bool:
        """Whether those at some place are; looks at each place that leads from `root` once."""
        while self._work:
            place = self._work.pop()
            if place not in self._places:
                self._places.add(place)
                if self._is_doubtful(place):
                    return True
        return False

    def _is_doubtful(self, place: Place) -> bool:
        """Whether arrays or objects at this place are; the places in them are looked at later."""
        parts = [part for shape, firm in place for part in self._containers(shape, firm)]
        arrays = [(part, firm) for part, firm in parts if isinstance(part, Array)]
        objects = [(part, firm) for part, firm in parts if isinstance(part, Object)]
        self._work += [_items(arrays), *_members(objects)]
        if any(part.unique for part, _ in arrays):
            if len(arrays) > 1 and not all(firm for _, firm in arrays):
                return True
            if any(part.contains or part.prefix for part, _ in arrays):
                return True
            if not self._is_sure(both(*(part.items for part, _ in arrays))):
                return True
        if not any(counts_names(part) for part, _ in objects):
            return False
        return len(objects) > 1 or any(
            part.patterns or part.names is not None or part.max_properties is not None for part, _ in objects
        )

    def _containers(
        self, shape: Shape, firm: bool, following: frozenset[str] = frozenset()
    ) -> Iterator[tuple[Array | Object, bool]]:
        """The arrays and objects that `shape` speaks of, and whether each holds wherever the value is of its kind.

        following  targets that led here: what leads back to them speaks of nothing more
        """
        check()
        match shape:
            case Array() | Object():
                yield shape, firm
            case Reference(target) if target not in following:
                yield from self._containers(self._resolve(target), firm, following | {target})
            case Both(parts):
                for part in parts:
                    yield from self._containers(part, firm, following)
            case Union(parts) | ExactlyOne(parts):
                firm = firm and tells_kinds_apart(parts, self._kinds)
                for part in parts:
                    yield from self._containers(part, firm, following)
            case Not(inner):
                yield from self._containers(inner, False, following)
            case Implied(inner):
                yield from self._containers(inner, firm, following)

    def _is_sure(self, shape: Shape) -> bool:
        """Whether the language of `shape` counts its values, or these are many."""
        return self._is_counted(shape, 0) or self._has_many(shape, 0)

    def _is_counted(self, shape: Shape, depth: int) -> bool:
        """Whether it is certain at a glance that an automaton has the texts of `shape`, each of which it allows."""
        if not self._kinds(shape) & {"array", "object"}:
            return True
        match shape:
            case Literals():
                return True
            case Reference():
                return depth < _MAX_DEPTH and self._followed(self._is_counted, shape, depth + 1)
            case Implied(inner):
                return self._is_counted(inner, depth)
            case Union(parts):
                return all(self._is_counted(part, depth) for part in parts)
            case Array():
                is_plain = not shape.unique and not shape.contains and not shape.prefix
                return is_plain and depth < _MAX_DEPTH and self._is_counted(shape.items, depth + 1)
            case Object():
                is_plain = self._is_closed(shape) and not shape.patterns and not shape.min_properties
                items = [item for _, item in shape.properties]
                return is_plain and depth < _MAX_DEPTH and all(self._is_counted(item, depth + 1) for item in items)
            case _:
                return False

    def _has_many(self, shape: Shape, depth: int) -> bool:
        """Whether it is certain at a glance that values of this shape are many."""
        match shape:
            case Anything():
                return True
            case Reference():
                return depth < _MAX_DEPTH and self._followed(self._has_many, shape, depth + 1)
            case Implied(inner):
                return self._has_many(inner, depth)
            case Union(parts):
                return any(self._has_many(part, depth) for part in parts)
            case ExactlyOne(parts):
                return tells_kinds_apart(parts, self._kinds) and any(self._has_many(part, depth) for part in parts)
            case Text(low, high):
                return shape == Text(low, high) and (high is None or high >= max(_MANY_CHARACTERS, low))
            case Number(minimum=low, maximum=high):
                return (low is None or high is None) and shape == Number(shape.integer, minimum=low, maximum=high)
            case Array():
                is_plain = not shape.unique and not shape.contains and not shape.prefix and shape.max_items != 0
                return is_plain and depth < _MAX_DEPTH and self._has_many(shape.items, depth + 1)
            case Object():
                return self._some_member([shape], depth)
            case Both(parts):
                objects = [part for part in map(self._resolved, parts) if isinstance(part, Object)]
                return len(objects) == len(parts) and self._some_member(objects, depth)
            case _:
                return False

    def _followed(self, asks: Callable[[Shape, int], bool], shape: Reference, depth: int) -> bool:
        """What `asks` says of the target of `shape`: once for each depth, as definitions may refer to each other."""
        key = (asks.__name__, shape.target, depth)
        if key not in self._answers:
            check()
            self._answers[key] = asks(self._resolved(shape), depth)
        return self._answers[key]

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
                if alone and self._has_many(item, depth + 1):
                    return True
        return False

    def _is_closed(self, shape: Object) -> bool:
        (whole,) = self._closed((shape,))
        assert isinstance(whole, Object)
        return whole.max_properties == 0 or whole.additional == NOTHING

    def _kinds(self, shape: Shape) -> frozenset[str]:
        """The kinds that values of `shape` may have, behind references too."""
        found = self._known_kinds.get(shape)
        if found is None:
            self._known_kinds[shape] = frozenset(KINDS)  # of what contains itself
            found = self._known_kinds[shape] = self._look_at(shape)
        return found

    def _look_at(self, shape: Shape) -> frozenset[str]:
        match shape:
            case Reference(target):
                return self._kinds(self._resolve(target))
            case Union(parts) | ExactlyOne(parts):
                return frozenset[str]().union(*map(self._kinds, parts))
            case Both(parts):
                return frozenset(KINDS).intersection(*map(self._kinds, parts))
            case _:
                return frozenset(possible_kinds(shape))

    def _resolved(self, shape: Shape) -> Shape:
        for _ in range(_MAX_REFERENCES):
            if not isinstance(shape, Reference):
                break
            shape = self._resolve(shape.target)
        return shape


def _items(arrays: list[tuple[Array, bool]]) -> Place:
    """What the items of arrays may have to be, all places at once."""
    found = [(item, firm) for part, firm in arrays for item in (*part.prefix, part.items)]
    found += [(wanted.shape, False) for part, _ in arrays for wanted in part.contains]
    return tuple(dict.fromkeys(found))


def _members(objects: list[tuple[Object, bool]]) -> Iterator[Place]:
    """The same of the members of objects, one place for each name that is declared."""
    found: dict[str, dict[tuple[Shape, bool], None]] = {}
    for part, firm in objects:
        for name, item in part.properties:
            found.setdefault(name, {})[item, firm] = None
    yield from map(tuple, found.values())
    yield tuple(dict.fromkeys((item, firm) for part, firm in objects for _, item in part.patterns))
    yield tuple(dict.fromkeys((part.additional, firm) for part, firm in objects))


def no_text_found(spec: JsonSchema) -> Issue:
    """That no text of `spec` is found whose items, or names, differ."""
    for keyword, is_asked, remedy in (
        ("uniqueItems", lambda value: value is True, "lower minItems or minContains, or let items have more values"),
        ("minProperties", lambda value: isinstance(value, int | float) and value > 1, "lower it, or declare members"),
    ):
        pointer = _first(spec.schema, keyword, is_asked, "")
        if pointer is not None:
            return Issue(pointer, keyword, f"no text is found that keeps {keyword} beside its other keywords; {remedy}")
    return Issue("", "", "no text is found whose items and names differ as they have to; ask for fewer of them")


def _first(part: Any, keyword: str, is_asked: Callable[[Any], bool], pointer: str) -> str | None:
    """The pointer of the first keyword of this name that asks for something."""
    if isinstance(part, dict) and keyword in part and is_asked(part[keyword]):
        return f"{pointer}/{keyword}"
    inner = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ()
    found = (_first(value, keyword, is_asked, f"{pointer}/{escape(str(name))}") for name, value in inner)
    return next(filter(None, found), None)
