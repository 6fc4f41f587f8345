"""Plain schemas: those whose shape shows at a glance, as they name a scalar type or refer to others. Most are such."""

from __future__ import annotations

from typing import Any

from graftlm.core.grammar.schema.algebra.shapes import Boolean, Null, Number, Reference, Shape, Text
from graftlm.core.grammar.schema.reading import keywords
from graftlm.core.grammar.schema.reading.references import References

_WITH_TYPE = keywords.SILENT | {"type"}
_WITH_REFERENCE = keywords.BESIDE_REFERENCE - {"$id"}
_OF_TYPE: dict[str, Shape] = {
    "string": Text(),
    "integer": Number(integer=True),
    "number": Number(),
    "boolean": Boolean(),
    "null": Null(),
}


def plain_shape(schema: dict[str, Any], references: References) -> Shape | None:
    """The shape of a schema that says nothing but of which scalar type its values are, or what it refers to.

    None for other schemas, and where more has to be known of the reference.
    """
    if "type" in schema:
        name = schema["type"]
        return _OF_TYPE.get(name) if type(name) is str and _WITH_TYPE.issuperset(schema) else None
    if "$ref" not in schema or not _WITH_REFERENCE.issuperset(schema):
        return None
    target = references.known_target(schema["$ref"])
    return None if target is None else Reference(target)
