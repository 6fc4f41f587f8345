"""How many places a pushdown automaton of a schema takes, whose parts are rules, as its shapes tell before lowering."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from os.path import commonprefix

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.automata.stack.call_plan import LARGE, Survey
from graftlm.core.grammar.schema.algebra import text_language
from graftlm.core.grammar.schema.algebra.shapes import (
    NOTHING,
    Anything,
    Array,
    Both,
    ExactlyOne,
    Implied,
    Literals,
    Number,
    Object,
    Reference,
    Shape,
    Text,
    Union,
    Unkept,
)
from graftlm.core.grammar.schema.irregular import closed
from graftlm.core.grammar.schema.reading.json_schema import SchemaReader
from graftlm.core.grammar.schema.text.declared import is_plain
from graftlm.core.grammar.schema.text.tokens import JsonTokens
from graftlm.core.grammar.spec import JsonSchema, Options

_MARGIN = 1.1
_PLACES_OF_NUMBER = 30
_PLACES_OF_ANY_NAME = 24
_PLACES_OF_OTHER_NAMES = 45
_PLACES_OF_LETTER = 3
"""Of a name that a member of another name must differ from."""
_AROUND_NAME = 4
_OPEN = -1
"""Of a rule that is being counted."""
_RULES = (Reference, Both, ExactlyOne, Object, Array, Text, Number)


def takes_many_called_places(reader: SchemaReader, spec: JsonSchema, options: Options) -> bool:
    """Whether `plan_calls` would refuse the rules that the schema is lowered to; no where it needs none.

    Of two collections, strict and open, 140 schemas as long as the limit had a pushdown automaton: none counted more.
    """
    limit = options.limits.states
    if len(spec.text) <= limit:
        return False
    places = _CalledPlaces(reader, spec, options)
    return places.of_all() > _MARGIN * limit and places.is_irregular


class _CalledPlaces:
    """Counts a large rule where it is met first; after that, and inside itself, it is called and takes one place.

    Places of a rule itself, and those of the rules that it names, are counted apart: a repeat calls a rule many times.
    """

    def __init__(self, reader: SchemaReader, spec: JsonSchema, options: Options) -> None:
        self._reader = reader
        self._strict = options.strict
        self._tokens = JsonTokens(spec, options, has_rules=False, for_automata=True)
        self._rules: dict[Shape, int] = {}
        self._parts: dict[Shape, int] = {}
        """Of the rule that is being counted, those that are no rules themselves."""
        self.is_irregular = False

    def of_all(self) -> int:
        return sum(self._of(Reference("")))

    def _of(self, shape: Shape) -> tuple[int, int]:
        """Places of `shape` and of rules that it names and that were not counted before."""
        if not isinstance(shape, _RULES):
            known = self._parts.get(shape)
            if known is not None:
                return known, 0
            own, inner = self._count(shape)
            self._parts[shape] = own
            return own, inner
        size = self._rules.get(shape)
        if size is None:
            self._rules[shape] = _OPEN
            outer, self._parts = self._parts, {}
            size = sum(self._count(shape))
            self._parts = outer
            self._rules[shape] = size if size <= LARGE else 0
        elif size == _OPEN:
            self.is_irregular = True
            size = 0
        return 1, size

    def _sum(self, shapes: Iterable[Shape]) -> tuple[int, int]:
        own = inner = 0
        for shape in shapes:
            places, of_rules = self._of(shape)
            own += places
            inner += of_rules
        return own, inner

    def _count(self, shape: Shape) -> tuple[int, int]:
        match shape:
            case Anything() | Unkept():
                self.is_irregular = True
                return 1, 0
            case Reference(target):
                return self._of(self._reader.shape(target))
            case Implied(inner):
                return self._of(inner)
            case Union(parts) | ExactlyOne(parts):
                return self._sum(parts)
            case Both(parts):
                return self._both(parts)
            case Literals(texts):
                return sum(map(len, texts)), 0
            case Text():
                return self._text(shape), 0
            case Number():
                return _PLACES_OF_NUMBER, 0
            case Array():
                return self._array(shape)
            case Object():
                return self._object(shape, is_walked=not is_plain(shape))
            case _:
                return 4, 0

    def _text(self, shape: Text) -> int:
        try:
            return Survey.of(self._tokens.of_shape(shape, text_language.quoted(shape))).num_places
        except GrammarError:  # lowering says so, if the text is needed
            return 0

    def _array(self, shape: Array) -> tuple[int, int]:
        own, inner = self._sum(shape.prefix)
        own += 2 + len(shape.prefix)
        high = shape.max_items
        if high is not None and high <= len(shape.prefix):
            return own, inner
        item, of_rules = self._of(shape.items)
        return own + (item + 1) * (shape.min_items + 1 if high is None else high), inner + of_rules

    def _both(self, parts: tuple[Shape, ...]) -> tuple[int, int]:
        """Those of all parts: objects are walked together, and are no rules of their own."""
        own = inner = 0
        for part in map(self._found, parts):
            places, of_rules = self._object(part, is_walked=True) if isinstance(part, Object) else self._of(part)
            own += places
            inner += of_rules
        return own, inner

    def _found(self, shape: Shape) -> Shape:
        while isinstance(shape, Reference | Implied):
            shape = self._reader.shape(shape.target) if isinstance(shape, Reference) else shape.shape
        return shape

    def _object(self, shape: Object, is_walked: bool) -> tuple[int, int]:
        """Of an object that is walked, members up to the first that is required are written after others and first."""
        (whole,) = closed((shape,)) if self._strict else (shape,)
        assert isinstance(whole, Object)
        own, inner = 2, 0
        times = 2 if is_walked else 1
        required = set(whole.required)
        for i, (name, member) in enumerate(whole.properties):
            if i == 0 and name in required:
                times = 1
            places, of_rules = self._of(member)
            own += times * (len(name) + _AROUND_NAME + places)
            inner += of_rules
            if name in required:
                times = 1
        for _, member in whole.patterns:
            places, of_rules = self._of(member)
            own += times * places
            inner += of_rules
        if whole.additional == NOTHING:
            return own, inner
        others, of_rules = self._of(whole.additional)
        return own + times * (others + _of_other_names([name for name, _ in whole.properties])), inner + of_rules


def _of_other_names(names: list[str]) -> int:
    if not names:
        return _PLACES_OF_ANY_NAME
    words = sorted(("", *names))
    letters = sum([len(word) - len(commonprefix((before, word))) for before, word in pairwise(words)])
    return _PLACES_OF_OTHER_NAMES + _PLACES_OF_LETTER * letters
