"""GBNF, the grammars of llama.cpp's servers: a regular expression or choices as such a grammar.

A grammar costs milliseconds here and one field of the request. Answers are checked on this side whatever it allows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.lark_text import is_ebnf
from graftlm.core.grammar.nodes import nodes
from graftlm.core.grammar.nodes.nodes import Node, Range
from graftlm.core.grammar.regex.parser import parse

MAX_REPEATS = 1_000
"""Counts of a repeat: llama.cpp writes each out as a rule and refuses more than 2,000 of them."""

_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\\": "\\\\"}
_IN_TEXT = _ESCAPES | {'"': '\\"'}
_IN_SET = _ESCAPES | {"]": "\\]", "[": "\\[", "^": "\\x5E", "-": "\\x2D"}


def regex_to_gbnf(pattern: str) -> str | None:
    """Return the grammar of the texts that a pattern matches; None if GBNF cannot express it."""
    return _written(pattern)


def choices_to_gbnf(choices: Iterable[str]) -> str:
    """Return the grammar of exactly these texts."""
    return "root ::= " + " | ".join(_literal(choice) if choice else '""' for choice in choices)


def grammar_to_gbnf(text: str) -> str | None:
    """Return a grammar that is EBNF with the rule `root` as it is; None for Lark."""
    return text if is_ebnf(text) and "root" in text else None


@lru_cache(maxsize=256)
def _written(pattern: str) -> str | None:
    try:
        return f"root ::= {_alternatives(parse(pattern))}"
    except (GrammarError, _Inexpressible, UnicodeDecodeError):
        return None


class _Inexpressible(Exception):
    """A node that GBNF has no form for: a product of languages, a graph, or too many repeats."""


def _alternatives(node: Node) -> str:
    match node:
        case nodes.Alternation(items) if items:
            return " | ".join(_sequence(item) for item in items)
        case _:
            return _sequence(node)


def _sequence(node: Node) -> str:
    match node:
        case nodes.Concat(items):
            return " ".join(_atom(item) for item in items)
        case _:
            return _atom(node)


def _atom(node: Node) -> str:
    match node:
        case nodes.Empty():
            return '""'
        case nodes.Literal(data):
            return _literal(data.decode())
        case nodes.CharSet(ranges):
            return f"[{''.join(map(_range, ranges))}]"
        case nodes.Repeat(item, low, high):
            if max(low, high or 0) > MAX_REPEATS:
                raise _Inexpressible
            return f"({_alternatives(item)}){{{low},{'' if high is None else high}}}"
        case nodes.Concat() | nodes.Alternation((_, *_)):
            return f"({_alternatives(node)})"
        case _:
            raise _Inexpressible


def _literal(text: str) -> str:
    return '"' + "".join(_char(char, _IN_TEXT) for char in text) + '"'


def _range(given: Range) -> str:
    low, high = max(given[0], 1), given[1]  # llama.cpp ends its texts at 0
    return _char(chr(low), _IN_SET) + ("" if low == high else f"-{_char(chr(high), _IN_SET)}")


def _char(char: str, escapes: Mapping[str, str]) -> str:
    if char in escapes:
        return escapes[char]
    if " " <= char <= "~":
        return char
    return f"\\u{ord(char):04X}" if ord(char) < 1 << 16 else f"\\U{ord(char):08X}"
