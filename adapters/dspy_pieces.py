"""Languages put one after the other: the constraint of a reply made of literals and typed values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from graftlm.core.grammar import ast
from graftlm.core.grammar.lowering import Lowered, lower_schema as lower
from graftlm.core.grammar.spec import Composite, JsonSchema, Options

_OPTIONS = Options(on_unsupported="warn")


def literal(text: str) -> Lowered:
    return Lowered(ast.literal(text), {})


def lower_schema(schema: Mapping[str, Any]) -> Lowered:
    """The JSON text of a schema. A keyword that no grammar keeps is dropped: what DSPy parses, it also validates."""
    return lower(JsonSchema(dict(schema)), _OPTIONS)


def joined(pieces: Iterable[Lowered]) -> Composite:
    """One constraint of all pieces in order, with the rules of those that are not regular."""
    parts = list(pieces)
    rules = {name: body for part in parts for name, body in part.rules.items()}
    return Composite(ast.concat(*(part.node for part in parts)), tuple(rules.items()))
