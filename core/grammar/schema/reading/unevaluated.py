"""`unevaluatedProperties` and `unevaluatedItems`: what the keywords beside them look at, case by case.

Which members and items those are may depend on which alternatives a value matches. Each combination is a case of its
own: the condition under which it applies, and what is looked at then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import Any, Protocol

from graftlm.core.errors import GrammarError, shortened
from graftlm.core.grammar.schema.algebra import text_language
from graftlm.core.grammar.schema.algebra.shapes import (
    ANYTHING,
    EVERY_TYPE,
    Array,
    Not,
    Object,
    Shape,
    both,
    negation,
    union,
)
from graftlm.core.grammar.schema.reading import assertions
from graftlm.core.grammar.schema.reading.references import References, escape, ref_stands_alone

MAX_CASES = 128


class Reader(Protocol):
    """What is needed of a SchemaReader."""

    references: References

    def read(self, schema: Any, pointer: str) -> Shape: ...


@dataclass(frozen=True)
class Looked:
    """What keywords look at: members by name and pattern, and items up to a place or that match `contains`."""

    names: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    all_members: bool = False
    num_items: int = 0
    all_items: bool = False
    contains: tuple[Shape, ...] = ()

    def __or__(self, other: Looked) -> Looked:
        return Looked(
            tuple(dict.fromkeys(self.names + other.names)),
            tuple(dict.fromkeys(self.patterns + other.patterns)),
            self.all_members or other.all_members,
            max(self.num_items, other.num_items),
            self.all_items or other.all_items,
            tuple(dict.fromkeys(self.contains + other.contains)),
        )

    def members(self, rest: Shape) -> Shape:
        """Objects in which every other member is `rest`, and all other types."""
        if self.all_members:
            return ANYTHING
        names, patterns = (tuple((key, ANYTHING) for key in keys) for keys in (self.names, self.patterns))
        return _or_other_type(Object(properties=names, patterns=patterns, additional=rest, closed=True))

    def items(self, rest: Shape) -> Shape:
        """Arrays in which every other item is `rest`, and all other types."""
        if self.all_items:
            return ANYTHING
        return _or_other_type(Array(prefix=(ANYTHING,) * self.num_items, items=union(rest, *self.contains)))


Case = tuple[Shape, Looked]
NOTHING_LOOKED_AT: Case = (ANYTHING, Looked())


def unevaluated(reader: Reader, schema: dict[str, Any], pointer: str) -> Shape:
    """What the two keywords admit, where `schema` at `pointer` has them. Raises GrammarError if cases are too many."""
    parts = []
    words: tuple[tuple[str, Callable[[Looked, Shape], Shape]], ...] = (
        ("unevaluatedProperties", Looked.members),
        ("unevaluatedItems", Looked.items),
    )
    for keyword, admitted in words:
        if keyword not in schema:
            continue
        rest = reader.read(schema[keyword], f"{pointer}/{keyword}")
        others = {word: value for word, value in schema.items() if not word.startswith("unevaluated")}
        cases = _Cases(reader, f"{pointer}/{keyword}")
        independent = cases.independent(others, pointer)
        try:
            found = cases.combined(independent)
        except GrammarError:
            if keyword == "unevaluatedItems" or any(looked.patterns for _, looked in _conditional(independent)):
                raise
            parts.append(_name_by_name(independent, rest))
            continue
        parts.append(union(*(both(condition, admitted(looked, rest)) for condition, looked in found)))
    return both(*parts)


def _conditional(independent: list[list[Case]]) -> list[Case]:
    return [case for cases in independent if len(cases) > 1 for case in cases]


def _name_by_name(independent: list[list[Case]], rest: Shape) -> Shape:
    """Objects whose members are each `rest`, or have a name that is looked at in a case that holds; and other types.

    Cases need not be combined for that: each name asks for one of those that look at it.
    """
    always = reduce(or_, (cases[0][1] for cases in independent if len(cases) == 1), Looked())
    if always.all_members:
        return ANYTHING
    conditional = _conditional(independent)
    whole = [condition for condition, looked in conditional if looked.all_members]
    conditions: dict[str, list[Shape]] = {}
    for condition, looked in conditional:
        for name in looked.names:
            if name not in always.names and not any(text_language.contains(p, name) for p in always.patterns):
                conditions.setdefault(name, []).append(condition)
    names: dict[tuple[Shape, ...], list[str]] = {}
    for name, found in conditions.items():
        names.setdefault(tuple(dict.fromkeys(found)), []).append(name)
    others = replace(always, names=(*always.names, *conditions)).members(rest)
    return both(
        union(others, *whole),
        *(
            union(_or_other_type(Object(tuple((name, rest) for name in group), closed=True)), *found, *whole)
            for found, group in names.items()
        ),
    )


class _Cases:
    def __init__(self, reader: Reader, place: str) -> None:
        self._reader = reader
        self._place = place
        self._following: list[str] = []

    def of(self, schema: Any, pointer: str) -> list[Case]:
        """The cases of a schema, each with what it looks at."""
        return self.combined(self.independent(schema, pointer))

    def combined(self, independent: list[list[Case]]) -> list[Case]:
        return reduce(self._each, independent, [NOTHING_LOOKED_AT])

    def independent(self, schema: Any, pointer: str) -> list[list[Case]]:
        """The cases of each part of a schema that all of its values satisfy; one of each holds."""
        if not isinstance(schema, dict):
            return []
        draft = self._reader.references.draft(pointer)
        if "$ref" in schema and ref_stands_alone(draft):
            return self._target(schema["$ref"], pointer, "$ref")
        found: list[list[Case]] = [[(ANYTHING, self._own(schema, pointer, draft))]]
        for keyword in ("$ref", "$dynamicRef", "$recursiveRef"):
            if isinstance(schema.get(keyword), str):
                found += self._target(schema[keyword], pointer, keyword)
        for i, item in enumerate(schema.get("allOf", ())):
            found += self.independent(item, f"{pointer}/allOf/{i}")
        for i, item in enumerate(schema.get("anyOf", ())):
            found.append(self._if_it_holds(item, f"{pointer}/anyOf/{i}"))
        found.append(self._one_of(schema.get("oneOf", ()), f"{pointer}/oneOf"))
        if "if" in schema:
            found.append(self._conditional(schema, pointer))
        for keyword in ("dependentSchemas", "dependencies"):
            for name, item in assertions.mapping(schema, keyword, pointer).items():
                inner = self.of(item, f"{pointer}/{keyword}/{escape(name)}")
                if inner != [NOTHING_LOOKED_AT]:
                    present = Object(required=(name,))
                    found.append([(Not(present), Looked()), *((both(present, when), looked) for when, looked in inner)])
        return found

    def _own(self, schema: dict[str, Any], pointer: str, draft: int | None) -> Looked:
        items, prefix = schema.get("items"), schema.get("prefixItems", [])
        if not isinstance(prefix, list):
            where = f"{pointer}/prefixItems"
            raise GrammarError(f"{where}: {shortened(prefix)} is not a list of schemas", pointer=where)
        contains: tuple[Shape, ...] = ()
        if "contains" in schema and draft != 2019:
            contains = (self._reader.read(schema["contains"], f"{pointer}/contains"),)
        by_position = isinstance(items, list)
        return Looked(
            names=tuple(assertions.mapping(schema, "properties", pointer)),
            patterns=tuple(assertions.mapping(schema, "patternProperties", pointer)),
            all_members="additionalProperties" in schema or "unevaluatedProperties" in schema,
            num_items=len(items) if isinstance(items, list) else len(prefix),
            all_items=(items is not None and not by_position)
            or (by_position and "additionalItems" in schema)
            or "unevaluatedItems" in schema,
            contains=contains,
        )

    def _target(self, reference: str, pointer: str, keyword: str) -> list[list[Case]]:
        references, place = self._reader.references, f"{pointer}/{keyword}"
        find = references.target if keyword == "$ref" else references.dynamic_target
        target = find(reference, place)
        if target is None or target in self._following:
            return []
        self._following.append(target)
        try:
            return self.independent(references.schema(target), target)
        finally:
            self._following.pop()

    def _if_it_holds(self, schema: Any, pointer: str) -> list[Case]:
        inner = self.of(schema, pointer)
        if inner == [NOTHING_LOOKED_AT]:
            return inner
        shape = self._reader.read(schema, pointer)
        return [(negation(shape), Looked()), *((both(shape, when), looked) for when, looked in inner)]

    def _one_of(self, schemas: Iterable[Any], pointer: str) -> list[Case]:
        found: list[Case] = []
        for i, schema in enumerate(schemas):
            shape = self._reader.read(schema, f"{pointer}/{i}")
            found += [(both(shape, when), looked) for when, looked in self.of(schema, f"{pointer}/{i}")]
        return found if any(looked != Looked() for _, looked in found) else [NOTHING_LOOKED_AT]

    def _conditional(self, schema: dict[str, Any], pointer: str) -> list[Case]:
        condition = self._reader.read(schema["if"], f"{pointer}/if")
        met = self._each(self.of(schema["if"], f"{pointer}/if"), self.of(schema.get("then"), f"{pointer}/then"))
        found = [(both(condition, when), looked) for when, looked in met]
        unmet = self.of(schema.get("else"), f"{pointer}/else")
        return found + [(both(negation(condition), when), looked) for when, looked in unmet]

    def _each(self, first: list[Case], second: list[Case]) -> list[Case]:
        """Each case of `first` with each of `second`; those in which the same is looked at are one."""
        conditions: dict[Looked, list[Shape]] = {}
        for a, x in first:
            for b, y in second:
                conditions.setdefault(x | y, []).append(both(a, b))
        if len(conditions) > MAX_CASES:
            raise GrammarError(
                f"{self._place}: depends on more than {MAX_CASES} combinations of anyOf, oneOf and if; "
                "list the properties in one schema with additionalProperties",
                pointer=self._place,
            )
        return [(union(*found), looked) for looked, found in conditions.items()]


def _or_other_type(shape: Shape) -> Shape:
    return union(shape, *(other for other in EVERY_TYPE if type(other) is not type(shape)))
