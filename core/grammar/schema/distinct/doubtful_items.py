"""Doubtful items: whether a schema may ask for items, or names, that differ more than its language shows.

Of most arrays with `uniqueItems` the language of an item tells how many there can be. Where it does not tell all, each
token has to be looked at for whether the text can still end after it: inside such an array where the array itself
surely has a value, and everywhere where it may have none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

from graftlm.core.grammar.budget import check
from graftlm.core.grammar.schema.algebra.kinds import plainly_apart, tells_kinds_apart
from graftlm.core.grammar.schema.algebra.shape_algebra import ShapeAlgebra
from graftlm.core.grammar.schema.algebra.shapes import (
    ANYTHING,
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
    both,
    item_at,
)
from graftlm.core.grammar.schema.algebra.values import compact, parse_value
from graftlm.core.grammar.schema.cursor import Containers
from graftlm.core.grammar.schema.distinct.item_values import ItemValues, items_of
from graftlm.core.grammar.schema.member_names import counts_names
from graftlm.core.grammar.schema.reading.references import escape
from graftlm.core.grammar.spec import Issue, JsonSchema


class Way(NamedTuple):
    """A way to be an array: what it then is, and what it then is not."""

    has: tuple[Array, ...] = ()
    lacks: tuple[Array, ...] = ()


Place: TypeAlias = tuple[tuple[Shape, int], ...]
"""What the value at one place may have to be: shapes, and how each holds."""

_EXCLUDED, _AT_TIMES, _ALWAYS = range(3)
"""A shape that values may have to lack; one that they may have to have; one that they have in any case."""
_MAX_WAYS = 64


class DoubtfulItems:
    """Whether items, or names, of `root` are doubtful.

    closed  gives the parts of an object without the members that strict mode leaves out
    """

    def __init__(
        self,
        root: Shape,
        algebra: ShapeAlgebra,
        closed: Callable[[tuple[Shape, ...]], tuple[Shape, ...]],
    ) -> None:
        self._algebra = algebra
        self._values = ItemValues(algebra, closed)
        self._known: dict[Containers, bool] = {}
        self.are_anywhere = False
        """Whether those of an array are at a place that was looked at."""
        self._places: set[Place] = set()
        self._work: list[Place] = [((root, _ALWAYS),)]

    def are_in(self, shapes: Containers) -> bool:
        """Whether those of an array that `shapes` speak of are: once an item is whole, no other one may be left."""
        if shapes not in self._known:
            self._known[shapes] = self._are_in(shapes)
        return self._known[shapes]

    def _are_in(self, shapes: Containers) -> bool:
        arrays = [part for part in shapes.parts if isinstance(part, Array)]
        are_firm = all(part in shapes.firm for part in arrays)
        wanted = [wanted for part in arrays for wanted in part.contains]
        if (len(arrays) > 1 or wanted) and not are_firm or any(part.prefix for part in arrays):
            return True
        if any(one.least > 1 or one.most is not None for one in wanted):
            return True
        items = items_of(arrays)  # what one `contains` still asks for is no item before: else it had asked for no more
        return not (self._values.are_counted(items) or self._values.are_many(items))

    def may_lack_values(self) -> bool:
        """Whether an array or object at some place may have no value; looks at each place from `root` on once.

        Nowhere else can what is written before an array, or behind it, leave no way to end the text.
        """
        while self._work:
            place = self._work.pop()
            if place not in self._places:
                self._places.add(place)
                if self._may_lack(place):
                    return True
        return False

    def _may_lack(self, place: Place) -> bool:
        """Whether arrays or objects at this place do; the places in them are looked at later."""
        check()
        arrays: list[tuple[Array, int]] = []
        objects: list[tuple[Object, int]] = []
        for shape, holds in place:
            self._look_for(shape, holds, frozenset(), arrays, objects)
        if arrays:
            self._work.append(_items(arrays))
        if objects:
            self._work += self._members(objects)
        if any(part.unique for part, _ in arrays):
            firm = frozenset(part for part, holds in arrays if holds == _ALWAYS)
            self.are_anywhere |= self.are_in(Containers(tuple(part for part, _ in arrays), firm))
            ways = self._ways_at(place)
            if ways is None and any(not _keeps_holding(part) for part, _ in arrays):
                return True
            if any(map(self._may_need_more, ways or ())):
                return True
        if not any(counts_names(part) for part, _ in objects):
            return False
        return len(objects) > 1 or any(
            part.patterns or part.names is not None or part.max_properties is not None for part, _ in objects
        )

    def _may_need_more(self, way: Way) -> bool:
        """Whether an array of this way may need more items than there are different ones.

        One with repeats has the shapes still if these are left out or become other values, or if it is its first item.
        """
        least = max((part.min_items for part in way.has), default=0)
        first = both(*(item_at(part, 0) for part in way.has))
        lacks = [part for part in way.lacks if not (least and plainly_apart(first, item_at(part, 0)))]
        wanted = [one for part in way.has for one in part.contains]
        if least < 2 and not wanted and all(part.min_items > 1 for part in lacks):
            return False
        if any(part.prefix for part in (*way.has, *lacks)) or any(part.contains for part in lacks):
            return True
        items = items_of(way.has)
        if any(one.most is not None for one in wanted):
            return least > 1 or bool(lacks) or any(one.least > 1 for one in wanted)
        are_many = self._values.are_many(items)
        if not are_many and any(part.max_items is not None for part in lacks):
            return True
        several = [one for one in wanted if one.least > 1]
        if any(not self._values.are_many(both(items, one.shape)) for one in several):
            return True
        return least > 1 and not (are_many or self._values.are_at_least(items, least))

    def _ways_at(self, place: Place) -> list[Way] | None:
        """The ways to be an array at a place; None if they are too many, or some of them excludes an array."""
        ways: list[Way] | None = [Way()]
        for shape, holds in place:
            found = self._ways(shape, frozenset())
            if found is not None and holds != _ALWAYS:
                without = _apart([Way()], [found]) if holds == _EXCLUDED else []
                found = None if without is None else [Way(), *without, *found]
            ways = _joined(ways, found)
            if ways is None:
                break
        return ways

    def _ways(self, shape: Shape, following: frozenset[str]) -> list[Way] | None:
        check()
        if "array" not in self._values.kinds(shape):
            return []
        match shape:
            case Array():
                return [Way((shape,))]
            case Literals(texts):
                return [Way((part,)) for part in map(_constant, texts) if part is not None]
            case Anything():
                return [Way()]
            case Reference(target) if target not in following:
                return self._ways(self._algebra.resolve(target), following | {target})
            case Implied(inner):
                return self._ways(inner, following)
            case Both(parts):
                ways: list[Way] | None = [Way()]
                for part in parts:
                    ways = _joined(ways, self._ways(part, following))
                return ways
            case Union(parts) | ExactlyOne(parts):
                found = [self._ways(part, following) for part in parts]
                if isinstance(shape, ExactlyOne) and not tells_kinds_apart(parts, self._values.kinds):
                    found = [_apart(ways, found[:i] + found[i + 1 :]) for i, ways in enumerate(found)]
                if any(ways is None for ways in found):
                    return None
                return list(dict.fromkeys(way for ways in found for way in ways or ()))
            case Not(inner) if "array" not in self._values.kinds(inner):
                return [Way()]
            case _:
                return None

    def _look_for(
        self,
        shape: Shape,
        holds: int,
        following: frozenset[str],
        arrays: list[tuple[Array, int]],
        objects: list[tuple[Object, int]],
    ) -> None:
        """Add the arrays and objects that `shape` speaks of, and how each holds where the value is of its kind.

        following  targets that led here: what leads back to them speaks of nothing more
        """
        match shape:  # the most common first; most of what a schema says is of scalars
            case Object():
                objects.append((shape, holds))
            case Reference(target):
                if target not in following:
                    inner = self._algebra.resolve(target)
                    self._look_for(inner, holds, following | {target}, arrays, objects)
            case Array():
                arrays.append((shape, holds))
            case Both(parts):
                for part in parts:
                    self._look_for(part, holds, following, arrays, objects)
            case Union(parts) | ExactlyOne(parts):
                if not tells_kinds_apart(parts, self._values.kinds):
                    holds = min(holds, _AT_TIMES if isinstance(shape, Union) else _EXCLUDED)
                for part in parts:
                    self._look_for(part, holds, following, arrays, objects)
            case Not(inner):
                self._look_for(inner, _EXCLUDED, following, arrays, objects)
            case Implied(inner):
                self._look_for(inner, holds, following, arrays, objects)
            case Literals(texts):
                arrays += [(part, holds) for part in map(_constant, texts) if part is not None]

    def _members(self, objects: list[tuple[Object, int]]) -> Iterator[Place]:
        """What the members of objects may have to be: a place for each name that is declared, one for the others."""
        if len(objects) == 1 and not objects[0][0].patterns:
            ((part, holds),) = objects
            yield from [((item, holds),) for _, item in part.properties if type(item) not in _SCALARS]
            yield ((part.additional, holds),)
            return
        found: dict[str, dict[tuple[Shape, int], None]] = {}
        for part, holds in objects:
            for name, item in part.properties:
                found.setdefault(name, {})[item, holds] = None
        others = [(part, holds) for part, holds in objects if part.patterns or part.additional not in _PLAIN]
        for name, place in found.items():
            for part, holds in others:
                if part.property(name) is None:
                    place[self._algebra.member(part, name), holds] = None
            yield tuple(place)
        items = [(item, holds) for part, holds in objects for _, item in part.patterns]
        items += [(part.additional, holds) for part, holds in objects]
        yield _at_times(items)


_PLAIN = (ANYTHING, NOTHING)
_SCALARS = frozenset({Anything, Boolean, Null, Number, Text})
"""What speaks of no array or object."""


def _items(arrays: list[tuple[Array, int]]) -> Place:
    """What the items of arrays may have to be, all places at once."""
    found = [(item, holds) for part, holds in arrays for item in (*part.prefix, part.items)]
    found += [
        (wanted.shape, _EXCLUDED if wanted.most is not None else min(holds, _AT_TIMES))
        for part, holds in arrays
        for wanted in part.contains
    ]
    is_one = all(not part.prefix for part, _ in arrays)
    return tuple(dict.fromkeys(found)) if is_one else _at_times(found)


def _at_times(found: list[tuple[Shape, int]]) -> Place:
    """A place of values of which some have one of these shapes, others another one."""
    several = len(set(found)) > 1
    return tuple(dict.fromkeys((shape, min(holds, _AT_TIMES) if several else holds) for shape, holds in found))


def _constant(text: str) -> Array | None:
    """The array that is this one value."""
    if text[0] != "[":
        return None
    prefix = tuple(Literals((compact(item),)) for item in parse_value(text))
    return Array(prefix, NOTHING, len(prefix), len(prefix))


def _keeps_holding(part: Array) -> bool:
    """Whether arrays that have, or lack, this shape do so still without their repeats."""
    is_open = part.min_items <= 1 and not part.max_items and not part.prefix
    return is_open and all(one.least <= 1 and one.most is None for one in part.contains)


def _joined(ways: list[Way] | None, more: list[Way] | None) -> list[Way] | None:
    """Each of `ways` at once with each of `more`; None if one is not known, or they are too many."""
    if ways is None or more is None or len(ways) * len(more) > _MAX_WAYS:
        return None
    pairs = ((way.has + other.has, way.lacks + other.lacks) for way in ways for other in more)
    return list(dict.fromkeys(Way(tuple(dict.fromkeys(has)), tuple(dict.fromkeys(lacks))) for has, lacks in pairs))


def _apart(ways: list[Way] | None, others: list[list[Way] | None]) -> list[Way] | None:
    """`ways` where none of `others` holds; None if these are more than an array each."""
    excluded = [way for other in others for way in (other if other is not None else [Way()])]
    if any(way.lacks or len(way.has) != 1 for way in excluded):
        return None
    return _joined(ways, [Way((), tuple(array for way in excluded for array in way.has))])


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
