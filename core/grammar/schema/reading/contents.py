"""Formats of strings, among them what a string holds (`contentEncoding`, `contentMediaType`, `contentSchema`)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.nodes.nodes import Node
from graftlm.core.grammar.nodes.rules import written_out
from graftlm.core.grammar.schema.algebra.formats import (
    ALIASES,
    ANNOTATIONS as ANNOTATION_FORMATS,
    CONTENT_ENCODINGS,
    FORMATS,
    INTEGER_RANGES,
    UNKEPT as UNKEPT_FORMATS,
    ContentFormat,
)
from graftlm.core.grammar.schema.algebra.shapes import Reference, Text
from graftlm.core.grammar.schema.reading import keywords
from graftlm.core.grammar.spec import JsonSchema, Options

if TYPE_CHECKING:
    from graftlm.core.grammar.schema.reading.json_schema import SchemaReader

DEPTH, DEPTH_INSIDE = 3, 2
"""How deep arrays and objects nest where the schema says nothing of a value, alone in a string or beside others: the
texts of any depth are not regular."""


def encoding(reader: SchemaReader, schema: Mapping[str, Any], pointer: str) -> str | None:
    """How the content of a string is encoded, if that is kept; as with formats, others are annotations."""
    name = schema.get("contentEncoding")
    if not isinstance(name, str) or name.lower() in CONTENT_ENCODINGS:
        return name.lower() if isinstance(name, str) else None
    near = next((known for known in CONTENT_ENCODINGS if keywords.is_misspelled(name, known)), None)
    if near is not None:
        message = f"unknown encoding {name!r}; did you mean {near!r}?"
        reader.refuse(pointer, "contentEncoding", message, judged=False)
    else:
        reader.annotate(pointer, "contentEncoding", f"the encoding {name!r} restricts nothing")
    return None


def format_name(reader: SchemaReader, schema: Mapping[str, Any], pointer: str) -> str | None:
    """The format of a string that is kept; names that nobody checks are annotations."""
    name = schema.get("format")
    name = ALIASES.get(name, name) if isinstance(name, str) else None
    if name is None or name in FORMATS:
        return name
    near = next((known for known in FORMATS if keywords.is_misspelled(name, known)), None)
    if near is not None or name in UNKEPT_FORMATS:
        hint = f"did you mean {near!r}?" if near else f"known: {', '.join(FORMATS)}"
        reader.refuse(pointer, "format", f"format {name!r} cannot be kept; {hint}", judged=near is None)
    elif name not in ANNOTATION_FORMATS and name not in INTEGER_RANGES:
        reader.annotate(pointer, "format", f"unknown format {name!r} restricts nothing")
    return None


def content(reader: SchemaReader, schema: Mapping[str, Any], pointer: str, shape: Text) -> ContentFormat | None:
    """What a string of `shape` holds, if that has to be JSON."""
    media = schema.get("contentMediaType")
    if not isinstance(media, str) or media.partition(";")[0].strip().lower() != "application/json":
        return None
    if "contentEncoding" in schema:
        if (reader.references.draft(pointer) or 0) >= 2019:
            reader.annotate(pointer, "contentMediaType", "that what is encoded is JSON restricts nothing")
        else:  # drafts before leave it to validators whether they look
            message = "encoded JSON cannot be kept; leave out the media type, or nest the value itself"
            reader.refuse(pointer, "contentMediaType", message, judged=False)
        return None
    if schema.get("contentSchema", True) in (True, {}):
        if shape == Text():
            return any_json(reader.options, DEPTH)
        note = "beside lengths and patterns 'application/json' restricts nothing"
        if reader.options.on_unsupported == "error":  # few readers hold the text to it
            reader.annotate(pointer, "contentMediaType", note)
        else:
            reader.refuse(pointer, "contentMediaType", note)
        return None
    inside = f"{pointer}/contentSchema"
    try:
        return _of_schema(reader, inside)
    except GrammarError as error:
        if reader.inside:
            raise
        reader.refuse(pointer, "contentMediaType", f"{error}; nest the value itself, without a string around it")
        return None


def _of_schema(outer: SchemaReader, pointer: str) -> ContentFormat:
    """Strings that hold JSON of the schema at `pointer`. Raises GrammarError where these are not regular."""
    from graftlm.core.grammar.schema.lowering import Lowering  # it lowers what has been read

    class Contents(Lowering):
        def _any_value(self) -> Node:
            return any_json(options, DEPTH_INSIDE).node

    spec, options = outer.spec, outer.options
    if pointer in outer.inside:
        raise GrammarError("JSON that holds itself cannot be kept inside a string")
    with closing(type(outer)(spec, options, inside=(*outer.inside, pointer))) as reader:
        lowering = Contents(spec, options, reader)
        node = written_out(lowering.value(Reference(pointer)), lowering.rules)
        outer.issues += reader.issues
        outer.annotations += reader.annotations
    if node is None:
        raise GrammarError("JSON that holds itself, or is too large to be written out, cannot be kept inside a string")
    said = (spec.text, spec.documents_text, pointer, options.strict, options.whitespace, options.bounded_numbers)
    return ContentFormat(f"JSON {said}", node)


def any_json(options: Options, depth: int) -> ContentFormat:
    """Strings that hold JSON of which the schema says nothing; it nests `depth` levels at most."""
    return _any_json(Options(whitespace=options.whitespace, bounded_numbers=options.bounded_numbers), depth)


@lru_cache(maxsize=8)
def _any_json(options: Options, depth: int) -> ContentFormat:
    from graftlm.core.grammar.schema.lowering import lower_schema

    scalars = {"type": ["null", "boolean", "number", "string"]}
    levels: dict[str, Any] = {"0": scalars}
    for level in range(1, depth + 1):
        inner = {"$ref": f"#/$defs/{level - 1}"}
        levels[f"{level}"] = {
            "anyOf": [scalars, {"type": "array", "items": inner}, {"type": "object", "additionalProperties": inner}]
        }
    lowered = lower_schema(JsonSchema({"$defs": levels, "$ref": f"#/$defs/{depth}"}), options)
    node = written_out(lowered.node, lowered.rules)
    assert node is not None, "no level contains itself"
    return ContentFormat(f"any JSON {(depth, options.whitespace, options.bounded_numbers)}", node)
