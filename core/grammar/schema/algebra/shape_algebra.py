"""Boolean operations on shapes: reduce one to a kind of JSON value, list its cases, ask whether it is empty."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.budget import check
from graftlm.core.grammar.schema.algebra import kinds as kinds_of, scalars
from graftlm.core.grammar.schema.algebra.cases import Cases
from graftlm.core.grammar.schema.algebra.kinds import KINDS, KINDS_OF, KindsBehind, possible_kinds
from graftlm.core.grammar.schema.algebra.membership import Membership
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
    Unkept,
    both,
    item_at,
    negation,
    union,
)
from graftlm.core.grammar.schema.algebra.values import (
    narrow_literals,
)

if TYPE_CHECKING:
    from graftlm.core.grammar.schema.text.member_ways import MemberWays

_NEVER_EMPTY = frozenset({Anything, Null, Boolean, Literals, Unkept})
_FOLLOWED = 8
"""References to references that are followed for a first look."""

_FREE: dict[str, Number | Text] = {"number": Number(), "string": Text()}


class _OpenError(Exception):
    """A part of a container leads back to the container, whose shape is being looked at."""


class ShapeAlgebra(Membership):
    """Set operations on shapes; `resolve` reads the target of a reference.

    standard  whether implied types count for nothing, also in what is written
    """

    def __init__(self, resolve: Callable[[str], Shape], *, standard: bool = False) -> None:
        super().__init__(resolve)
        self.cases = Cases()
        self._standard = standard
        self._kinds = KindsBehind(resolve, standard=standard)
        self.excludes_unique = False
        """Whether arrays with `uniqueItems` were excluded: others are never written just because items are equal."""
        self._narrowed: dict[tuple[Shape, str, bool], Shape | int] = {}  # while it is looked at: how deep that began
        self._depth = 0  # of containers whose parts are looked at
        self._empty: dict[Shape, bool] = {}
        self._split: dict[tuple[Shape, str], list[scalars.Scalar]] = {}
        self._expanded: dict[ExactlyOne, Shape] = {}
        self.branches: dict[tuple[Shape, tuple[tuple[Shape, frozenset[Shape]], ...]], list[tuple[Shape, Shape]]] = {}
        """What a member may be and what that leaves of a formula; by the formula, and shapes with what fails where
        the member lacks them. A schema may be lowered more than once."""
        self.member_ways: dict[Shape, MemberWays] = {}
        """What may follow in the objects of a formula, likewise."""

    @cached_property
    def _by_the_standard(self) -> ShapeAlgebra:
        return ShapeAlgebra(self.resolve, standard=True)

    def close(self) -> None:
        """Let go of what refers back to here, so that all is freed at once."""
        self.member_ways.clear()
        self.branches.clear()
        if "_by_the_standard" in self.__dict__:
            self._by_the_standard.close()

    def narrow(self, shape: Shape, kind: str, positive: bool = True) -> Shape:
        """The values of one kind in `shape` or, unless `positive`, outside of it.

        -> Union and Both of shapes of that kind and of Not of these; ANYTHING and NOTHING stand for all and no values
        of the kind.
        """
        kinds = KINDS_OF.get(type(shape))
        if kinds is not None:
            return self._narrow_leaf(shape, kind, positive) if kind in kinds else NOTHING if positive else ANYTHING
        key = (shape, kind, positive)
        found = self._narrowed.get(key)
        if found is None:
            check()
            self._narrowed[key] = self._depth
            try:
                found = self._narrowed[key] = self._narrow(shape, kind, positive)
            finally:
                if found is None:
                    del self._narrowed[key]
        if isinstance(found, int):
            if found < self._depth:
                raise _OpenError
            target = shape.target if isinstance(shape, Reference) else ""
            raise GrammarError(
                f"{target or '/'}: this definition is part of itself without anything between, so it says nothing; "
                "remove the $ref",
                pointer=target,
            )
        return found

    def _narrow(self, shape: Shape, kind: str, positive: bool) -> Shape:
        if positive and kind not in self._kinds(shape):
            return NOTHING
        if isinstance(shape, (Union, Both)):  # the most common first
            parts = shape.alternatives if isinstance(shape, Union) else shape.parts
            join = union if isinstance(shape, Union) == positive else both
            return join(*[self.narrow(part, kind, positive) for part in parts])
        match shape:
            case Implied(inner):
                self._kinds.met_implied = True
                if kind in KINDS_OF[type(inner)]:
                    return self.narrow(inner, kind, positive)
                return ANYTHING if positive and self._standard else NOTHING
            case Literals(texts):
                return narrow_literals(texts, kind, positive)
            case Reference(target):
                return self.narrow(self.resolve(target), kind, positive)
            case Not(inner):
                return self.narrow(inner, kind, not positive)
            case ExactlyOne():
                return self.narrow(self.expanded(shape), kind, positive)
            case Anything():
                return ANYTHING if positive else NOTHING
            case Unkept():
                return ANYTHING
        raise AssertionError(shape)

    def _narrow_leaf(self, shape: Shape, kind: str, positive: bool) -> Shape:
        if kind in ("null", "true", "false"):
            return ANYTHING if positive else NOTHING
        self.excludes_unique |= not positive and isinstance(shape, Array) and shape.unique
        return shape if positive else Not(shape)

    def pieces(self, shape: Shape, kind: str, *, outside: bool = False) -> list[scalars.Scalar]:
        """Return the numbers or strings of `shape`, or those that it lacks, as alternatives without Not."""
        return self._pieces(self.narrow(shape, kind, positive=not outside), kind)

    def _pieces(self, narrowed: Shape, kind: str) -> list[scalars.Scalar]:
        key = (narrowed, kind)
        if key not in self._split:
            self._split[key] = self._split_up(narrowed, kind)
        return self._split[key]

    def _split_up(self, narrowed: Shape, kind: str) -> list[scalars.Scalar]:
        match narrowed:
            case Union(parts):
                return list(dict.fromkeys(piece for part in parts for piece in self._pieces(part, kind)))
            case Both(parts):
                found: list[scalars.Scalar] = [_FREE[kind]]
                for part in sorted(parts, key=lambda part: isinstance(part, Union)):
                    others = self._pieces(part, kind) if isinstance(part, Union) else [part]
                    if len(found) * len(others) > scalars.MAX_PIECES:
                        raise GrammarError(
                            f"combining {len(found)} with {len(others)} alternatives gives more than "
                            f"{scalars.MAX_PIECES:,}; nest fewer anyOf under allOf"
                        )
                    found = [piece for one in found for other in others for piece in scalars.both(one, other)]
                return list(dict.fromkeys(found))
            case Anything():
                return [_FREE[kind]]
            case _:
                return scalars.meet([narrowed], _FREE[kind])

    def expanded(self, shape: ExactlyOne) -> Shape:
        """`shape` as a union; an alternative excludes only those that it may share values with."""
        if shape not in self._expanded:
            parts = [part for part in shape.alternatives if not self._is_nothing_to_all(part)]
            rivals: list[list[Shape]] = [[] for _ in parts]
            for i, j in kinds_of.pairs_to_compare([self._resolved(part) for part in parts]):
                if not self._apart(parts[i], parts[j]):
                    rivals[i].append(negation(parts[j]))
                    rivals[j].append(negation(parts[i]))
            self._expanded[shape] = union(*(both(part, *others) for part, others in zip(parts, rivals, strict=True)))
        return self._expanded[shape]

    def _is_nothing_to_all(self, shape: Shape) -> bool:
        """Whether no value has this shape, also by the standard."""
        if not self.is_nothing(shape):
            return False
        return self._standard or not self._kinds.met_implied or self._by_the_standard.is_nothing(shape)

    def _apart(self, a: Shape, b: Shape) -> bool:
        if a == b:
            return False
        one, other = self._resolved(a), self._resolved(b)
        if kinds_of.plainly_apart(one, other) or (not self._standard and kinds_of.objects_apart(one, other)):
            return True
        objects = tuple([shape for shape in (one, other) if isinstance(shape, Object)])
        if not (self._no_object(objects) if len(objects) == 2 else self.is_nothing(both(a, b))):
            return False
        if self._standard or not self._kinds.met_implied:
            return True
        # what is written of one must not have the other by the standard
        written = [kind for kind in KINDS if any(self.narrow(shape, kind) != NOTHING for shape in (a, b))]
        return all(self._by_the_standard._none_of(both(a, b), kind) for kind in written)

    def _resolved(self, shape: Shape) -> Shape:
        for _ in range(_FOLLOWED):
            if not isinstance(shape, Reference):
                break
            shape = self.resolve(shape.target)
        return shape

    def is_nothing(self, shape: Shape) -> bool:
        """Whether it is certain that no value has this shape."""
        if type(shape) in _NEVER_EMPTY:
            return False
        found = self._empty.get(shape)
        if found is None:
            self._empty[shape] = False  # what contains itself: not certain
            found = self._empty[shape] = self._is_nothing(shape)
        return found

    def _is_nothing(self, shape: Shape) -> bool:
        if isinstance(shape, (Number, Text)):
            return scalars.certainly_empty(shape)
        match shape:
            case Object():
                return bool(shape.required or shape.max_properties is not None) and self._no_object((shape,))
            case Reference(target):
                return self.is_nothing(self.resolve(target))
            case Union(parts):
                return all(map(self.is_nothing, parts))
            case ExactlyOne():
                return self.is_nothing(self.expanded(shape))
            case Array():
                return bool(shape.min_items or shape.contains) and self._no_array((shape,))
            case _:
                return all(self._none_of(shape, kind) for kind in possible_kinds(shape) if kind in self._kinds(shape))

    def reduced(self, shape: Shape) -> Shape:
        """`shape`, as pieces where it is of one scalar kind; NOTHING where it is certain that no value has it."""
        if self.is_nothing(shape):
            return NOTHING
        kinds = possible_kinds(shape) if isinstance(shape, Both) else ()
        if len(kinds) == 1 and kinds[0] in _FREE:
            return union(*self.pieces(shape, kinds[0]))
        return shape

    def _none_of(self, shape: Shape, kind: str) -> bool:
        narrowed = self.narrow(shape, kind)
        if narrowed is NOTHING or narrowed is ANYTHING:
            return narrowed is NOTHING
        if kind in _FREE:
            return not self._pieces(narrowed, kind)
        found = self.cases.of(narrowed)
        return found is not None and all(self._no_case(case) for case in found)

    def _no_case(self, case: tuple[Shape, ...]) -> bool:
        """Whether it is certain that no array or object has all of these shapes."""
        objects = tuple(part for part in case if isinstance(part, Object))
        arrays = tuple(part for part in case if isinstance(part, Array))
        return bool(objects) and self._no_object(objects) or bool(arrays) and self._no_array(arrays)

    def _no_object(self, parts: tuple[Object, ...]) -> bool:
        required = dict.fromkeys([name for part in parts for name in part.required])
        low = max(len(required), *[part.min_properties for part in parts])
        if any([part.max_properties is not None and low > part.max_properties for part in parts]):
            return True
        if len(parts) == 1:
            return any(self._no_part(self.member(parts[0], name)) for name in required)
        return any(self._no_part(both(*(self.member(part, name) for part in parts))) for name in required)

    def _no_array(self, parts: tuple[Array, ...]) -> bool:
        low = max(part.min_items for part in parts)
        high = min((part.max_items for part in parts if part.max_items is not None), default=None)
        if high is not None and low > high:
            return True
        longest = max(len(part.prefix) for part in parts)
        num_places = longest + 1 if high is None else min(longest + 1, high)
        wanted = {wanted.shape for part in parts for wanted in part.contains if wanted.least > 0}
        if any(
            all(self._no_part(both(shape, *(item_at(part, i) for part in parts))) for i in range(num_places))
            for shape in wanted
        ):
            return True
        positions = range(min(low, longest + 1))
        return any(self._no_part(both(*(item_at(part, i) for part in parts))) for i in positions)

    def _no_part(self, shape: Shape) -> bool:
        """`is_nothing` of a member or item; it is not certain where that leads back to what is being looked at."""
        self._depth += 1
        try:
            return self.is_nothing(shape)
        except _OpenError:
            return False
        finally:
            self._depth -= 1
