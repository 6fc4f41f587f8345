"""Concatenation of languages: the constraint of a reply made of literals and typed values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any

from graftlm.core.grammar.nodes import nodes
from graftlm.core.grammar.nodes.rules import written_out
from graftlm.core.grammar.schema.lowering import Lowered, lower_schema as lower
from graftlm.core.grammar.spec import Composite, JsonSchema, Options

_OPTIONS = Options(on_unsupported="warn", bounded_numbers=True, whitespace="single")
"""DSPy shows values as `json.dumps` writes them."""


def literal(text: str) -> Lowered:
    return Lowered(nodes.literal(text), {})


def lower_schema(schema: Mapping[str, Any]) -> Lowered:
    """Return the language of a schema's JSON texts. Unsupported keywords are dropped: DSPy validates the value."""
    found = lower(JsonSchema(dict(schema)), _OPTIONS)
    regular = written_out(found.node, found.rules)
    return found if regular is None else replace(found, node=regular, rules={})


def joined(pieces: Iterable[Lowered]) -> list[Composite]:
    """Return the pieces in order, neighbours merged: each a regular language, or one value of a recursive schema."""
    links: list[Composite] = []
    for regular, group in groupby(pieces, lambda piece: not piece.rules):
        if regular:
            links.append(Composite(nodes.concat(*(piece.node for piece in group))))
        else:
            links += [Composite(piece.node, tuple(piece.rules.items())) for piece in group]
    return links
