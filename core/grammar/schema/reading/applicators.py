"""Read keywords that apply other schemas to the same value: references, combinations, conditions, dependencies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.schema.algebra.shapes import (
    ANYTHING,
    ExactlyOne,
    Not,
    Object,
    Reference,
    Shape,
    both,
    negation,
    union,
)
from graftlm.core.grammar.schema.reading import assertions
from graftlm.core.grammar.schema.reading.references import escape

if TYPE_CHECKING:
    from graftlm.core.grammar.schema.reading.json_schema import SchemaReader

Schema = Mapping[str, Any]
Applicator = Callable[["SchemaReader", Schema, str], Shape]


def _dependencies(reader: SchemaReader, schema: Schema, pointer: str) -> Shape:
    """For each member that needs others: no object with it, or what it needs."""
    found: list[Shape] = []
    for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
        for name, needs in assertions.mapping(schema, keyword, pointer).items():
            if isinstance(needs, list):
                others = assertions.names({name: needs}, name, f"{pointer}/{keyword}")
                needed: Shape = Object(required=(name, *(other for other in others if other != name)))
            else:
                needed = reader.read(needs, f"{pointer}/{keyword}/{escape(name)}")
            found.append(union(Not(Object(required=(name,))), needed))
    return both(*found)


def reference(reader: SchemaReader, schema: Schema, pointer: str) -> Shape:
    """Read `$ref`."""
    reference = schema["$ref"]
    if not isinstance(reference, str):
        raise GrammarError(f"{pointer}/$ref: {reference!r} is not a reference", pointer=f"{pointer}/$ref")
    if pointer and "$id" in schema and reader.references.draft(pointer) is None:
        message = "drafts differ about '$id' beside '$ref'; name the draft in '$schema'"
        reader.refuse(pointer, "$id", message, judged=False)
    return Reference(reader.references.target(reference, f"{pointer}/$ref"))


def _dynamic_reference(reader: SchemaReader, schema: Schema, pointer: str) -> Shape:
    keyword = "$dynamicRef" if "$dynamicRef" in schema else "$recursiveRef"
    reference = schema[keyword]
    if not isinstance(reference, str):
        raise GrammarError(f"{pointer}/{keyword}: {reference!r} is not a reference", pointer=f"{pointer}/{keyword}")
    target = reader.references.dynamic_target(reference, f"{pointer}/{keyword}")
    if target is None:
        message = f"{reference!r} has several targets, and which one holds depends on the way to it; use $ref"
        reader.refuse(pointer, keyword, message)
        return ANYTHING
    return Reference(target)


def _all(reader: SchemaReader, schema: Schema, pointer: str) -> Shape:
    items = assertions.schemas(schema, "allOf", pointer)
    return both(*(reader.read(item, f"{pointer}/allOf/{i}") for i, item in enumerate(items)))


def _any(reader: SchemaReader, schema: Schema, pointer: str) -> Shape:
    items = assertions.schemas(schema, "anyOf", pointer)
    return union(*(reader.read(item, f"{pointer}/anyOf/{i}") for i, item in enumerate(items)))


def _one(reader: SchemaReader, schema: Schema, pointer: str) -> Shape:
    items = assertions.schemas(schema, "oneOf", pointer)
    shapes = tuple(reader.read(item, f"{pointer}/oneOf/{i}") for i, item in enumerate(items))
    return ExactlyOne(shapes) if len(shapes) > 1 else shapes[0]


def _not(reader: SchemaReader, schema: Schema, pointer: str) -> Shape:
    shape = reader.read(schema["not"], f"{pointer}/not")
    return assertions.excluded(shape, reader.references.schema, reader.shape, reader.items_differ)


def _if(reader: SchemaReader, schema: Schema, pointer: str) -> Shape:
    condition = reader.read(schema["if"], f"{pointer}/if")
    then, otherwise = (reader.read(schema.get(word, True), f"{pointer}/{word}") for word in ("then", "else"))
    if then == otherwise == ANYTHING:
        return ANYTHING
    return union(both(condition, then), both(negation(condition), otherwise))


APPLICATORS: dict[str, Applicator] = {
    "$ref": reference,
    "$dynamicRef": _dynamic_reference,
    "$recursiveRef": _dynamic_reference,
    "allOf": _all,
    "anyOf": _any,
    "oneOf": _one,
    "not": _not,
    "if": _if,
    "dependentRequired": _dependencies,
    "dependentSchemas": _dependencies,
    "dependencies": _dependencies,
}
APPLYING = frozenset(APPLICATORS)
