"""How many places of an automaton a schema takes without rules, told before the automaton is built."""

from __future__ import annotations

from itertools import pairwise
from os.path import commonprefix
from typing import TYPE_CHECKING

from graftlm.core.grammar.automata.nfa.least_places import LONG, takes_more_places
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


def is_too_large(lowered: Lowered, spec: JsonSchema, options: Options) -> bool:
    """Whether a longer schema, lowered without rules, has no automaton for sure: with rules it mostly has one.

    In two collections that held for 12 schemas, of which 11 have a pushdown automaton, of 4,700 places at most.
    """
    return not lowered.rules and len(spec.text) > LONG and takes_more_places(lowered.node, 4 * options.limits.states)


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
