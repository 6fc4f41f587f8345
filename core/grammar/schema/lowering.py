"""Lower shapes to the language of their JSON text.

The result is a node over bytes and the rules that it names. A language of which no rule contains itself is regular:
`nodes/rules.py` writes it out for the DFA; other engines take the rules.
"""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.budget import check, limited
from graftlm.core.grammar.nodes import nodes
from graftlm.core.grammar.nodes.nodes import EMPTY, NOTHING, Node, Rule
from graftlm.core.grammar.nodes.rules import Substitution, written_out
from graftlm.core.grammar.schema.algebra import text_language
from graftlm.core.grammar.schema.algebra.kinds import KINDS
from graftlm.core.grammar.schema.algebra.shapes import (
    ANYTHING,
    NOTHING as NO_SHAPE,
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
)
from graftlm.core.grammar.schema.reading.json_schema import SchemaReader
from graftlm.core.grammar.schema.satisfiability import blame, unending
from graftlm.core.grammar.schema.text import numbers
from graftlm.core.grammar.schema.text.conditions import to_walk
from graftlm.core.grammar.schema.text.declared import is_plain, members
from graftlm.core.grammar.schema.text.items import Items, merged
from graftlm.core.grammar.schema.text.members import Members
from graftlm.core.grammar.schema.text.tokens import JsonTokens
from graftlm.core.grammar.schema.unique_items import (
    OneSpelling,
    Place,
    has_free_names,
    num_texts,
    places_of,
)
from graftlm.core.grammar.spec import Issue, JsonSchema, Options, Whitespace

MAX_NESTING = 5  # shapes written out inside one another before one of them becomes a rule


@dataclass(frozen=True)
class Lowered:
    """A language and the rules that it refers to.

    The names of rules tell schemas and options apart, so languages of several schemas can share one grammar.
    """

    node: Node
    rules: dict[str, Node]
    issues: tuple[Issue, ...] = ()
    annotations: tuple[Issue, ...] = ()


def lower_schema(spec: JsonSchema, options: Options, *, items_differ: bool = False) -> Lowered:
    """Return the JSON text of the values that a schema admits.

    items_differ  the caller keeps `uniqueItems` beside the language, by `unique_places`; else it is not kept

    Raises GrammarError for what cannot be kept or satisfied.
    """
    with limited(options.limits), closing(SchemaReader(spec, options, items_differ=items_differ)) as reader:
        return lower_read(reader, spec, options)


def lower_read(reader: SchemaReader, spec: JsonSchema, options: Options) -> Lowered:
    """Return the same of a schema that was read before."""
    with limited(options.limits):
        return Lowering(spec, options, reader).lower()


def unique_places(spec: JsonSchema, options: Options, reader: SchemaReader) -> Place | None:
    """Return where items, or names of members, of the text must differ; None if nowhere.

    Raises GrammarError, or adds an issue to `reader`, for each `uniqueItems` that a mask cannot keep.
    """
    with limited(options.limits):
        return places_of(reader, Lowering(spec, options, reader).close)


@lru_cache(maxsize=8)
def any_value_rules(whitespace: Whitespace, bounded_numbers: bool) -> tuple[str, dict[str, Node]]:
    """Return the rule of any value, and all rules for it: the same in each grammar."""
    spec, options = JsonSchema(True), Options(whitespace=whitespace, bounded_numbers=bounded_numbers)
    lowering = Lowering(spec, options, SchemaReader(spec, options))
    name = f"{lowering.tokens.prefix} any value"
    lowering._nodes[ANYTHING] = Rule(name)
    shapes: tuple[Shape, ...] = (Text(), Number(), Boolean(), Null(), Array(), Object())
    lowering.rules[name] = nodes.alternation(*map(lowering.value, shapes))
    return name, lowering.rules


_NAMED = (Reference, Both, ExactlyOne, Object, Array, Text, Number)
"""Shapes that become rules: those that a schema names, or contains more than once."""


class Lowering:
    """Lowers the shapes of one schema document, each once.

    rules  by name
    """

    def __init__(self, spec: JsonSchema, options: Options, reader: SchemaReader) -> None:
        self._spec, self._options, self._reader = spec, options, reader
        self.algebra = self._reader.algebra
        self.names_differ, self.pointers = reader.items_differ, reader.pointers
        self.strict = options.strict
        self._whitespace = options.whitespace
        self._bounded_numbers = options.bounded_numbers
        self.tokens = JsonTokens(spec, options)
        self.rules: dict[str, Node] = {}
        self._ending: frozenset[str] = frozenset()  # rules that are known to derive finite strings
        self._nodes: dict[Shape, Node] = {}
        self.member_nodes: dict[Shape, Node] = {}  # of what members may be, and with their names:
        self.members: dict[tuple[str, Shape], Node] = {}
        self._open: dict[Shape, bool] = {}  # shapes being lowered, and whether they were met again inside
        self._shape_numbers: dict[Shape, int] = {}

    def lower(self) -> Lowered:
        """The JSON text of the whole document. Raises GrammarError when no value satisfies it."""
        node = self.value(Reference(""))
        barren = unending(self.rules, self._ending)
        if barren:
            node = self._without_rules(node, barren)
        if node == NOTHING and self._reader.contradictions:
            issue = self._reader.contradictions[0]
            raise GrammarError(str(issue), pointer=issue.pointer)
        if node == NOTHING:
            pointer, reason = blame(self._reader.shape(""), "", self.algebra, self.close)
            if self.algebra.excludes_unique:
                reason += "; arrays are never written with equal items to escape a 'uniqueItems' under 'not' or 'oneOf'"
            raise GrammarError(f"{pointer or '/'}: nothing can satisfy this: {reason}", pointer=pointer)
        return Lowered(node, self.rules, tuple(self._reader.issues), tuple(self._reader.annotations))

    def _without_rules(self, node: Node, barren: list[str]) -> Node:
        """`node` and the rules without those that derive no finite text."""
        without = Substitution(dict.fromkeys(barren, NOTHING))
        self.rules = {name: without(body) for name, body in self.rules.items() if name not in without.rules}
        found = without(node)
        if found == NOTHING:
            target = barren[0].removeprefix(self.tokens.prefix).removeprefix(" ")
            raise GrammarError(
                f"{target or '/'}: nothing can satisfy this: the definition contains itself and has no way to end; "
                "make the inner reference optional or nullable",
                pointer=target,
            )
        return found

    def value(self, shape: Shape) -> Node:
        """The JSON text of the values of this shape."""
        found = self._nodes.get(shape)
        if found is not None:
            return found
        if shape in self._open:
            self._open[shape] = True
            name = self._rule_name(shape)
            self.rules.setdefault(name, NOTHING)
            return Rule(name)
        check()
        self._open[shape] = False
        node = self._lower(shape)
        is_recursive = self._open.pop(shape)
        is_named = isinstance(shape, _NAMED) or len(self._open) % MAX_NESTING == MAX_NESTING - 1
        if is_recursive or (is_named and not nodes.is_nothing(node)):
            name = self._rule_name(shape)
            self.rules[name] = node
            node = Rule(name)
        self._nodes[shape] = node
        return node

    def member_value(self, shape: Shape) -> Node:
        """The same where it may turn out that no value has this shape: then NOTHING."""
        return self.value(self.algebra.reduced(shape))

    def _rule_name(self, shape: Shape) -> str:
        if isinstance(shape, Reference):
            return f"{self.tokens.prefix} {shape.target}"
        number = self._shape_numbers.setdefault(shape, len(self._shape_numbers))
        return f"{self.tokens.prefix} shape {number}"

    def close(self, parts: tuple[Shape, ...]) -> tuple[Shape, ...]:
        """Strict mode: an object that declares members and says nothing of others has no others."""
        if not self.strict:
            return parts
        whole = closed(parts)
        if len(parts) == 1 and whole is not parts:
            self._reader.pointers.setdefault(whole[0], self.pointer(parts[0]))
        return whole

    def pointer(self, shape: Shape) -> str:
        """The JSON pointer of an object of the schema; empty for one that stands nowhere in it."""
        return self.pointers.get(shape, "")

    def _lower(self, shape: Shape) -> Node:
        match shape:
            case Anything() | Unkept():
                return self._any_value()
            case Reference(target):
                return self.value(self._reader.shape(target))
            case Union(alternatives):
                return nodes.alternation(*map(self.value, alternatives))
            case ExactlyOne():
                return self.value(self.algebra.expanded(shape))
            case Implied(inner):
                return self.value(inner)
            case Both() | Not():
                return self._combined(shape)
            case Literals(texts):
                scalars = [self.tokens.scalar_text(text) for text in texts if text[0] not in "[{"]
                others = [self.tokens.literal(json.loads(text)) for text in texts if text[0] in "[{"]
                return nodes.alternation(*scalars, *others)
            case Null():
                return nodes.literal("null")
            case Boolean():
                return nodes.alternation(nodes.literal("true"), nodes.literal("false"))
            case Number():
                if self._bounded_numbers and not self.algebra.is_nothing(shape):
                    return numbers.readable(shape)
                return NOTHING if self.algebra.is_nothing(shape) else self.tokens.of_shape(shape, numbers.number(shape))
            case Text():
                return self.tokens.of_shape(shape, text_language.quoted(shape))
            case Array():
                return self._arrays((shape,))
            case Object():
                return self._objects((shape,))

    def _combined(self, shape: Shape) -> Node:
        """What several schemas say at once, kind by kind."""
        narrowed = {kind: self.algebra.narrow(shape, kind) for kind in KINDS}
        if all(part == ANYTHING for part in narrowed.values()):
            return self._any_value()
        ways = [nodes.literal(kind) for kind in KINDS[:3] if narrowed[kind] == ANYTHING]
        for kind in ("number", "string"):
            if narrowed[kind] != NO_SHAPE:
                ways += map(self.value, self.algebra.pieces(shape, kind))
        for kind, lower in (("array", self._arrays), ("object", self._objects)):
            if narrowed[kind] != NO_SHAPE:
                ways += map(lower, to_walk(self, narrowed[kind]))
        return nodes.alternation(*(way for way in ways if not nodes.is_nothing(way)))

    def _any_value(self) -> Node:
        name, rules = any_value_rules(self._whitespace, self._bounded_numbers)
        self.rules.update(rules)
        self._ending |= rules.keys()
        return Rule(name)

    def _arrays(self, parts: tuple[Shape, ...]) -> Node:
        """Arrays that have all these shapes, each an Array, its Not, or a formula of them."""
        positive = [part for part in parts if isinstance(part, Array)]
        shape = merged(positive or [Array()])
        if shape.unique and not shape.prefix:
            shape = self._in_one_spelling(shape)
        others = [part for part in parts if not isinstance(part, Array)]
        if not others and not shape.contains:
            return self._array(shape)
        return self.tokens.bracketed("[", Items(self, both(shape, *others)).node(), "]")

    def _in_one_spelling(self, shape: Array) -> Array:
        """Return arrays of unique items with each item in one spelling; without items if there are too few values."""
        spelling = OneSpelling(self.algebra, self.close, self._whitespace == "flexible")
        items = spelling.of(shape.items)
        if items is None:
            return shape
        if shape.min_items > 1 and not spelling.by_value:
            lowering = Lowering(self._spec, self._options, self._reader)
            regular = written_out(lowering.value(items), lowering.rules)
            most = np.inf if regular is None else num_texts(regular)
            if most < shape.min_items:
                pointer = self.pointer(shape)
                reason = (
                    f"nothing can satisfy this: minItems asks for {shape.min_items} items and uniqueItems leaves "
                    f"{most:.0f} at most; lower it or allow more values"
                )
                self._reader.contradictions.append(Issue(f"{pointer}/minItems", "minItems", reason))
                return replace(shape, items=NO_SHAPE)
        return replace(shape, items=items)

    def _array(self, shape: Array) -> Node:
        low, high, prefix = shape.min_items, shape.max_items, list(shape.prefix)
        if self.algebra.is_nothing(shape.items):
            high = len(prefix) if high is None else min(high, len(prefix))
        for i, item in enumerate(prefix):
            if self.algebra.is_nothing(item):
                high = i if high is None else min(high, i)
                break
        if high is not None:
            prefix = prefix[:high]
        if high is not None and low > high:
            return NOTHING
        tail: Node = EMPTY
        if high is None or high > len(prefix):
            most = None if high is None else high - len(prefix)
            rest = self.value(shape.items)
            if not prefix:
                return self.tokens.bracketed("[", nodes.separated(rest, self.tokens.comma, low, high), "]")
            tail = nodes.repeat(nodes.concat(self.tokens.comma, rest), max(low - len(prefix), 0), most)
        for i in range(len(prefix) - 1, -1, -1):
            tail = nodes.concat(*([self.tokens.comma] if i else []), self.value(prefix[i]), tail)
            if i >= low:
                tail = nodes.optional(tail)
        return self.tokens.bracketed("[", tail, "]")

    def _objects(self, parts: tuple[Shape, ...]) -> Node:
        """Objects that have all these shapes, each an Object, its Not, or a formula of them."""
        parts = parts or (Object(),)
        if not self.names_differ or not has_free_names(parts):
            parts = tuple(map(self._uncounted, parts))
        whole = self.close(parts)
        try:
            plain = [part for part in whole if is_plain(part)]
            if len(plain) == len(whole):
                return self.tokens.bracketed("{", members(self, plain), "}")
            return self.tokens.bracketed("{", Members(self, both(*whole)).node(), "}")
        except GrammarError as error:
            if error.pointer is not None:
                raise
            pointer = next((self.pointer(part) for part in parts if isinstance(part, Object)), "")
            raise GrammarError(f"{pointer or '/'}: {error}", pointer=pointer) from error

    def _uncounted(self, part: Shape) -> Shape:
        """Return `part`; refuse `minProperties` if it counts names that the schema does not list."""
        if not isinstance(part, Object) or not part.counts_names:
            return part
        message = f"minProperties {part.min_properties} over names that the schema does not list cannot be kept"
        remedy = (
            "beside patterns or propertyNames that bound the names; require the properties"
            if self.names_differ
            else "in a larger grammar, as arguments of tools are; declare and require the properties"
        )
        self._reader.refuse(self.pointer(part), "minProperties", f"{message} {remedy}")
        kept = replace(part, min_properties=0)
        self._reader.pointers.setdefault(kept, self.pointer(part))
        return kept


def closed(parts: tuple[Shape, ...]) -> tuple[Shape, ...]:
    """`parts` of one object without members that none of them declares, unless one says something of others."""
    objects = [part for part in parts if isinstance(part, Object)]
    if len(parts) == len(objects) == 1:
        one = objects[0]
        if one.closed or not _declares(one):
            return parts
        sizes = one.min_properties, one.max_properties
        return (Object(one.properties, one.patterns, NO_SHAPE, one.required, *sizes, one.names, True),)
    if any([part.closed for part in objects]) or not any([_declares(part) for part in objects]):
        return parts
    names = dict.fromkeys([name for part in objects for name, _ in part.properties])
    patterns = dict.fromkeys([pattern for part in objects for pattern, _ in part.patterns])
    closing = Object(
        properties=tuple((name, ANYTHING) for name in names),
        patterns=tuple((pattern, ANYTHING) for pattern in patterns),
        additional=NO_SHAPE,
        closed=True,
    )
    return (*parts, closing)


def _declares(shape: Object) -> bool:
    return bool(shape.properties or shape.patterns or shape.empty)
