"""Read a JSON schema: from keywords to shapes. Nothing is skipped: what is not known or cannot be kept is an issue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from graftlm.core.errors import GrammarError, shortened
from graftlm.core.grammar.budget import check
from graftlm.core.grammar.schema.algebra import text_language
from graftlm.core.grammar.schema.algebra.shape_algebra import ShapeAlgebra
from graftlm.core.grammar.schema.algebra.shapes import (
    ANYTHING,
    EVERY_TYPE,
    NOTHING,
    Array,
    Boolean,
    Contains,
    Implied,
    Literals,
    Null,
    Number,
    Object,
    Shape,
    Text,
    both,
    union,
)
from graftlm.core.grammar.schema.algebra.shared_shapes import leave_out_gone
from graftlm.core.grammar.schema.algebra.values import compact, parse_value
from graftlm.core.grammar.schema.reading import applicators, assertions, contents, keywords
from graftlm.core.grammar.schema.reading.references import References, escape, ref_stands_alone
from graftlm.core.grammar.schema.reading.unevaluated import unevaluated
from graftlm.core.grammar.schema.text import numbers
from graftlm.core.grammar.spec import Issue, JsonSchema, Options

Schema = Mapping[str, Any]

_ANY_TEXT = Text()


class SchemaReader:
    """Reads one schema document. `shape(target)` is the shape of the schema at a JSON pointer, "" for the root.

    With `on_unsupported="error"` a keyword that cannot be kept raises GrammarError; with "warn" it is dropped and
    listed in `issues`.
    """

    def __init__(
        self, spec: JsonSchema, options: Options, *, items_differ: bool = False, inside: tuple[str, ...] = ()
    ) -> None:
        self.spec = spec
        self.options = options
        self.inside = inside  # the schemas of what strings hold that this reader reads one of
        self.items_differ = items_differ
        self.references = References(spec.schema, spec.documents, spec.text, spec.documents_text)
        self._shapes: dict[str, Shape] = {}
        self._reading: list[str] = []
        self._depth, self._max_depth = 0, options.limits.depth
        self.pointers: dict[Shape, str] = {}  # where the schema has each object, and each array of unique items, first
        self.issues: list[Issue] = []
        self.annotations: list[Issue] = []
        self.contradictions: list[Issue] = []  # enums without a value: errors where the schema needs them
        self.algebra = ShapeAlgebra(self.shape)
        for pointer in keywords.of_old_drafts({"": spec.schema, **spec.documents}):
            self.refuse(pointer, "$schema", keywords.TOO_OLD)

    @cached_property
    def _excludes(self) -> bool:
        return self.options.strict and keywords.excludes(self.spec.text + self.spec.documents_text)

    def shape(self, target: str) -> Shape:
        """What the schema at `target` admits."""
        if target not in self._shapes:
            if target in self._reading:
                raise GrammarError(
                    f"{target or '/'}: this definition is part of itself without anything between, so it says "
                    "nothing; remove the $ref",
                    pointer=target,
                )
            self._reading.append(target)
            try:
                self._shapes[target] = self.read(self.references.schema(target), target)
            finally:
                self._reading.pop()
        return self._shapes[target]

    def close(self) -> None:
        """Let go of all that was read: it is freed at once then, and no collector looks at it."""
        self.algebra.close()
        self.__dict__.clear()
        leave_out_gone()

    def refuse(self, pointer: str, keyword: str, message: str, *, judged: bool = True) -> None:
        """Raise, or with "warn" record, that `keyword` at `pointer` cannot be kept; "check" raises unless `judged`.

        judged  whether jsonschema keeps the keyword
        """
        issue = Issue(f"{pointer}/{escape(keyword)}", keyword, message)
        if self.options.on_unsupported == "error" or (self.options.on_unsupported == "check" and not judged):
            raise GrammarError(str(issue), pointer=issue.pointer)
        if issue not in self.issues:
            self.issues.append(issue)

    def annotate(self, pointer: str, keyword: str, note: str) -> None:
        """Record that `keyword` at `pointer` restricts nothing."""
        self.annotations.append(Issue(f"{pointer}/{escape(keyword)}", keyword, note))

    def read(self, schema: Any, pointer: str) -> Shape:
        if isinstance(schema, bool):
            return ANYTHING if schema else NOTHING
        if not isinstance(schema, dict):
            raise GrammarError(
                f"{pointer or '/'}: {shortened(schema)} is not a schema; a schema is an object or a boolean",
                pointer=pointer,
            )
        self._depth += 1
        if self._depth > self._max_depth:
            raise GrammarError(
                f"{pointer}: the schema nests deeper than {self.options.limits.depth} levels; "
                "flatten it or raise limits.depth",
                pointer=pointer,
            )
        try:
            return self._read_object(schema, pointer)
        finally:
            self._depth -= 1

    def _read_object(self, schema: dict[str, Any], pointer: str) -> Shape:
        if "$ref" in schema and (
            keywords.BESIDE_REFERENCE.issuperset(schema) or ref_stands_alone(self.references.draft(pointer))
        ):
            return applicators.reference(self, schema, pointer)
        if not keywords.KNOWN.issuperset(schema):
            self._check_keywords(schema, pointer)
        if not keywords.NEWER.isdisjoint(schema):
            schema = self._of_its_draft(schema, pointer)
        own = keywords.own_place(schema)
        if applicators.APPLYING.isdisjoint(schema):
            shape = ANYTHING if own is None else self._read_types(schema, pointer)
        else:
            parts: list[Shape] = []
            for keyword in schema:
                if keyword == own:
                    parts.append(self._read_types(schema, pointer))
                if keyword in applicators.APPLICATORS:
                    parts.append(applicators.APPLICATORS[keyword](self, schema, pointer))
            shape = both(*parts)
        if "enum" in schema or "const" in schema:
            shape = self._restrict(shape, schema, pointer)
        if "unevaluatedProperties" in schema or "unevaluatedItems" in schema:
            shape = both(shape, unevaluated(self, schema, pointer))
        return union(shape, Null()) if assertions.flag(schema, "nullable", pointer) else shape

    def _check_keywords(self, schema: Schema, pointer: str) -> None:
        for keyword in schema:
            if keyword == keywords.UNSUPPORTED:
                self._refuse_type(str(schema[keyword]), pointer)
            elif keyword not in keywords.KNOWN:
                near = keywords.near_miss(keyword)
                if near is not None:
                    message = f"unknown keyword {keyword!r}; did you mean {near!r}? Name a note x-{keyword}"
                    self.refuse(pointer, keyword, message, judged=False)
                else:
                    self.annotate(pointer, keyword, f"{keyword!r} restricts nothing")

    def _refuse_type(self, reason: str, pointer: str) -> None:
        """Raise, or with "warn" record, that a constraint of a Python type cannot be kept."""
        issue = Issue(pointer, keywords.UNSUPPORTED, reason)
        if self.options.on_unsupported != "warn":
            raise GrammarError(str(issue), pointer=pointer)
        if issue not in self.issues:
            self.issues.append(issue)

    def _of_its_draft(self, schema: dict[str, Any], pointer: str) -> dict[str, Any]:
        """`schema` without keywords that are newer than the draft which it names: notes, to that draft."""
        draft = self.references.draft(pointer)
        later = [keyword for keyword in schema if draft is not None and keywords.SINCE.get(keyword, 0) > draft]
        for keyword in later:
            self.annotate(pointer, keyword, f"{keyword!r} is newer than draft {draft}: it restricts nothing")
        return {keyword: value for keyword, value in schema.items() if keyword not in later} if later else schema

    def _read_types(self, schema: Schema, pointer: str) -> Shape:
        """The schema's own keywords about types, one shape for each type."""
        given = schema.get("type")
        if isinstance(given, str) and given in keywords.TYPES:  # as most have it
            return self._read_type(given, schema, pointer)
        types = assertions.types(schema, pointer, self.options.strict)
        shapes = [
            self._read_type(name, schema, pointer) for name in types if name != "integer" or "number" not in types
        ]
        if len(shapes) == 1 and "type" not in schema and self._excludes:
            return Implied(shapes[0])
        return union(*shapes) if tuple(shapes) != EVERY_TYPE else ANYTHING

    def _read_type(self, name: str, schema: Schema, pointer: str) -> Shape:
        match name:
            case "null":
                return Null()
            case "boolean":
                return Boolean()
            case "string":
                return self._read_text(schema, pointer)
            case "array":
                return self._read_array(schema, pointer)
            case "object":
                return self._read_members(schema, pointer)
            case _:
                return self._read_number(schema, pointer, integer=name == "integer")

    def _read_number(self, schema: Schema, pointer: str, integer: bool) -> Number:
        shape = assertions.number(schema, pointer, integer)
        try:
            numbers.number(shape)
        except GrammarError as error:
            self.refuse(pointer, "multipleOf", str(error))
            return replace(shape, multiple_of=())
        return shape

    def _read_text(self, schema: Schema, pointer: str) -> Text:
        if keywords.OF_STRINGS.isdisjoint(schema):
            return _ANY_TEXT
        low, high = assertions.lengths(schema, pointer)
        patterns: tuple[str, ...] = ()
        if "pattern" in schema:
            pattern = self._pattern(schema["pattern"], pointer, "pattern")
            patterns = (pattern,) if pattern is not None else ()
        names = (contents.encoding(self, schema, pointer), contents.format_name(self, schema, pointer))
        shape = Text(low, high, patterns, tuple([name for name in names if name is not None]))
        content = contents.content(self, schema, pointer, shape)
        return shape if content is None else replace(shape, formats=(*shape.formats, content))

    def _pattern(self, pattern: Any, pointer: str, keyword: str) -> str | None:
        """`pattern` if it can be kept."""
        if not isinstance(pattern, str):
            raise GrammarError(
                f"{pointer}/{keyword}: {shortened(pattern)} is not a pattern", pointer=f"{pointer}/{keyword}"
            )
        try:
            text_language.pattern_node(pattern)
        except GrammarError as error:
            self.refuse(pointer, keyword, f"pattern {shortened(pattern)}: {error}")
            return None
        return pattern

    def _read_array(self, schema: Schema, pointer: str) -> Array:
        items, rest = schema.get("items", True), f"{pointer}/items"
        if keywords.OF_ITEMS.isdisjoint(schema) and not isinstance(items, list):
            return Array((), self.read(items, rest), 0, None, (), False)
        low, high = assertions.counts(schema, pointer, "Items")
        prefix, first = schema.get("prefixItems", []), f"{pointer}/prefixItems"
        if isinstance(items, list):  # before draft 2020-12
            if "prefixItems" in schema:
                raise GrammarError(
                    f"{rest}: a list of schemas stands beside 'prefixItems', which has its meaning; remove one",
                    pointer=rest,
                )
            prefix, first = items, rest
            items, rest = schema.get("additionalItems", True), f"{pointer}/additionalItems"
        if not isinstance(prefix, list):
            raise GrammarError(f"{first}: {shortened(prefix)} is not a list of schemas", pointer=first)
        shape = Array(
            prefix=tuple(self.read(item, f"{first}/{i}") for i, item in enumerate(prefix)),
            items=self.read(items, rest),
            min_items=low,
            max_items=high,
            contains=self._read_contains(schema, pointer),
        )
        most = len(shape.prefix) if shape.items == NOTHING else high
        if not assertions.flag(schema, "uniqueItems", pointer) or (
            most is not None and min(most, most if high is None else high) <= 1
        ):
            return shape
        if not self.items_differ:
            self.refuse(pointer, "uniqueItems", "cannot be kept in a larger grammar; on_unsupported='warn' drops it")
            return shape
        shape = replace(shape, unique=True)
        self.pointers.setdefault(shape, pointer)
        return shape

    def _read_contains(self, schema: Schema, pointer: str) -> tuple[Contains, ...]:
        if "contains" not in schema:
            return ()
        least, most = (assertions.count(schema, word, pointer) for word in ("minContains", "maxContains"))
        wanted = Contains(self.read(schema["contains"], f"{pointer}/contains"), 1 if least is None else least, most)
        return () if wanted.least == 0 and most is None else (wanted,)

    def _read_members(self, schema: Schema, pointer: str) -> Object:
        low, high = assertions.counts(schema, pointer, "Properties")
        patterns: list[tuple[str, Shape]] = []
        for pattern, item in assertions.mapping(schema, "patternProperties", pointer).items():
            kept = self._pattern(pattern, f"{pointer}/patternProperties", pattern)
            if kept is not None:
                patterns.append((kept, self.read(item, f"{pointer}/patternProperties/{escape(pattern)}")))
        properties: list[tuple[str, Shape]] = []
        for name, item in assertions.mapping(schema, "properties", pointer).items():
            shape = self.read(item, f"{pointer}/properties/{escape(name)}")
            for pattern, more in patterns:
                if text_language.contains(pattern, name):
                    shape = both(shape, more)
            properties.append((name, shape))
        names = self.read(schema["propertyNames"], f"{pointer}/propertyNames") if "propertyNames" in schema else None
        closed = "additionalProperties" in schema
        others = self.read(schema["additionalProperties"], f"{pointer}/additionalProperties") if closed else ANYTHING
        required = assertions.names(schema, "required", pointer)
        empty = "properties" in schema and not properties
        shape = Object(tuple(properties), tuple(patterns), others, required, low, high, names, closed, empty)
        self.pointers.setdefault(shape, pointer)
        return shape

    def _restrict(self, shape: Shape, schema: Schema, pointer: str) -> Shape:
        """Apply `enum` and `const`."""
        for keyword in ("enum", "const"):
            if keyword not in schema:
                continue
            values = schema[keyword] if keyword == "enum" else [schema[keyword]]
            if not isinstance(values, list) or not values:
                raise GrammarError(
                    f"{pointer}/enum: {shortened(values)} is not a list of values; give at least one",
                    pointer=f"{pointer}/enum",
                )
            texts = dict.fromkeys(map(compact, values))
            check()
            free, is_text = shape == ANYTHING, shape == _ANY_TEXT
            kept = tuple(
                [
                    text
                    for text in texts
                    if free or (text[0] == '"' if is_text else self.algebra.admits(shape, parse_value(text)))
                ]
            )
            if not kept:
                reason = f"nothing can satisfy this: no value of {keyword!r} fits the other keywords"
                self.contradictions.append(Issue(f"{pointer}/{keyword}", keyword, reason))
                return NOTHING
            shape = Literals(kept)
        return shape
