"""How many places of an automaton a schema takes without rules, told before the automaton is built."""

from __future__ import annotations

from itertools import pairwise
from os.path import commonprefix
from typing import TYPE_CHECKING

from graftlm.core.grammar.automata.nfa.least_places import takes_more_places
from graftlm.core.grammar.schema.algebra.shapes import (
    Array,
    Both,
    ExactlyOne,
    Implied,
    Literals,
    Object,
    Reference,
    Shape,
    Union,
)
from graftlm.core.grammar.schema.reading.json_schema import SchemaReader
from graftlm.core.grammar.spec import JsonSchema, Options

if TYPE_CHECKING:
    from graftlm.core.grammar.schema.lowering import Lowered

_AROUND_NAME = 4
"""Bytes beside the name of a member: its quotation marks, the colon and a comma."""
_CHARACTERS_PER_STATE = 5
_COUNTED = 3_000
"""Characters of a schema from which on its places are counted, and any that refers to others: few shorter ones have
so many, and counting takes its time."""
_PLACES, _PLACES_FOR_PARSERS = 1.25, 1.5
"""Places for each state that is allowed, beyond which automata are mostly too large."""


def is_long(spec: JsonSchema, options: Options) -> bool:
    """Whether a schema of which only lowering would tell counts as one that is not regular.

    In two collections that held for 11 schemas, and none of them had a byte automaton.
    """
    return len(spec.text) > _CHARACTERS_PER_STATE * options.limits.states


def takes_many_places(reader: SchemaReader, spec: JsonSchema, options: Options) -> bool:
    """Whether the schema, with each definition written out where it is used, mostly takes more states than allowed.

    In a collection that held for 33 of 247 schemas, none of which had an automaton; the others with one stayed below
    two thirds of the limit.
    """
    limit = options.limits.states
    return len(spec.text) > limit and _Places(reader).of(Reference("")) > limit


def is_too_large(lowered: Lowered, spec: JsonSchema, options: Options, *, token_rules: bool) -> bool:
    """Whether a schema, lowered without rules, mostly takes more states than allowed: with rules it takes fewer places.

    token_rules  whether its rules would be for parsers, which does without the automaton of the few that have one

    Of 3,034 compiled schemas of two collections, 2 of those for which that holds had a byte automaton; with rules 26
    have a pushdown automaton.
    """
    if lowered.rules or len(spec.text) <= _COUNTED and not spec.documents:
        return False
    share = _PLACES_FOR_PARSERS if token_rules else _PLACES
    return takes_more_places(lowered.node, int(share * options.limits.states))


class _Places:
    """Counts those of each shape once, and none for one that contains itself."""

    def __init__(self, reader: SchemaReader) -> None:
        self._reader = reader
        self._known: dict[Shape, int] = {}

    def of(self, shape: Shape) -> int:
        found = self._known.get(shape)
        if found is None:
            self._known[shape] = 0
            found = self._known[shape] = self._count(shape)
        return found

    def _count(self, shape: Shape) -> int:
        match shape:
            case Reference(target):
                return self.of(self._reader.shape(target))
            case Implied(inner):
                return self.of(inner)
            case Union(parts) | ExactlyOne(parts):
                return sum(map(self.of, parts))
            case Both(parts):
                return max(map(self.of, parts))
            case Literals(texts):
                words = sorted(("", *texts))  # which share what they begin with
                return sum([len(word) - len(commonprefix((before, word))) for before, word in pairwise(words)])
            case Array(prefix, items, _, most):
                return sum(map(self.of, prefix)) + (0 if most == 0 else self.of(items))
            case Object(properties):
                return sum([len(name) + _AROUND_NAME + self.of(member) for name, member in properties])
            case _:
                return 0
