"""A plain text of a language, read off its node: it mostly shows that what a schema combines is not empty."""

from __future__ import annotations

from functools import lru_cache

from graftlm.core.grammar.nodes import nodes
from graftlm.core.grammar.nodes.nodes import Node, Range

_USUAL = tuple(map(ord, "a0A/ -.:_1"))
"""Characters that most readers take, in the order in which they are chosen."""
_MAX_LENGTH = 200


@lru_cache(maxsize=1024)
def plain_text(node: Node, times: int = 0) -> str | None:
    """One short text that `node`, which is regular, may match; None where its node shows none.

    Where a part of it is an intersection or a difference, the text may not match.

    times  how often what may repeat does, as far as it may
    """
    text = _text(node, times)
    return text if text is None or len(text) <= _MAX_LENGTH else None


def _text(node: Node, times: int) -> str | None:
    match node:
        case nodes.Literal(data):
            return data.decode()
        case nodes.CharSet(ranges):
            return _char(ranges)
        case nodes.Concat(items):
            parts = [_text(item, times) for item in items]
            return None if None in parts else "".join([part for part in parts if part is not None])
        case nodes.Alternation(items):
            return next((text for item in items if (text := _text(item, times)) is not None), None)
        case nodes.Repeat(item, minimum, maximum):
            repeats = max(minimum, times if maximum is None else min(times, maximum))
            text = _text(item, times) if 0 < repeats <= _MAX_LENGTH else None
            return text * repeats if text is not None else None if minimum else ""
        case nodes.Intersection(items):
            return _text(items[-1], times)
        case nodes.Difference(item, _):
            return _text(item, times)
        case nodes.Empty():
            return ""
        case _:
            return None


def _char(ranges: tuple[Range, ...]) -> str:
    for code in _USUAL:
        if any([low <= code <= high for low, high in ranges]):
            return chr(code)
    return chr(ranges[0][0])
