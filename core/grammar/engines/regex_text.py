"""Nodes as regexes, in the dialect of llguidance."""

from __future__ import annotations

from functools import lru_cache

from graftlm.core.grammar import ast
from graftlm.core.grammar.ast import Node
from graftlm.core.grammar.budget import check
from graftlm.core.grammar.engines.rules import decoded, quantifier, without_surrogates


class _NotPlainError(Exception):
    """A node takes several terminals."""


@lru_cache(maxsize=4096)
def plain(node: Node) -> str | None:
    """`node` as one regex; None where it takes several terminals."""
    try:
        return f"/{_regex(node) or '(?:)'}/"  # two slashes begin a comment
    except _NotPlainError:
        return None


def _regex(node: Node) -> str:
    match node:
        case ast.Literal(data):
            return decoded(data).translate(_ESCAPED)
        case ast.Empty():
            return ""
        case ast.CharSet(ranges):
            return char_class(ranges)
        case ast.Concat(items):
            return "".join(map(_regex, items))
        case ast.Alternation(()):
            return "[a&&b]"
        case ast.Alternation(items):
            check()
            return f"(?:{'|'.join(map(_regex, items))})"
        case ast.Repeat(item, minimum, maximum):
            text = _regex(item)
            is_one = type(item) is ast.CharSet or (type(item) is ast.Alternation and item.items)
            return f"{text if is_one else f'(?:{text})'}{quantifier(minimum, maximum)}"
        case ast.Intersection() | ast.Difference():
            raise _NotPlainError
        case _:
            raise AssertionError(node)


@lru_cache(maxsize=1024)
def char_class(ranges: tuple[ast.Range, ...]) -> str:
    parts = []
    for low, high in without_surrogates(ranges):
        parts.append(_char(low) if low == high else f"{_char(low)}-{_char(high)}")
    return f"[{''.join(parts)}]" if parts else "[a&&b]"


def _char(code: int) -> str:
    char = chr(code)
    return char if char.isascii() and char.isalnum() else f"\\x{{{code:X}}}"


class _Escaped(dict[int, str]):
    """For `str.translate`: code points as a regex has them."""

    def __missing__(self, code: int) -> str:
        char = chr(code)
        if not char.isascii():
            return _char(code)
        found = self[code] = char if char.isalnum() or char in _UNESCAPED else _char(code)
        return found


_UNESCAPED = frozenset("_ \"',:;=!%@-")
_ESCAPED = _Escaped()
