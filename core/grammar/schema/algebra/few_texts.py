"""Few texts: those of patterns and lengths that allow so few that items which must differ can run out."""

from __future__ import annotations

from graftlm.core.grammar.node_texts import texts_of
from graftlm.core.grammar.schema.algebra import text_language
from graftlm.core.grammar.schema.algebra.shapes import Text
from graftlm.core.grammar.schema.algebra.values import compact


def few_texts(shape: Text) -> frozenset[str] | None:
    """The JSON strings of `shape`; None where there may be many."""
    if shape.max_length == 0:
        return frozenset({'""'})
    for pattern in shape.patterns:
        found = texts_of(text_language.pattern_node(pattern))
        if found is not None:
            return frozenset(compact(text) for text in found if text_language.admits(shape, text))
    return None
