"""Lowering of guidance grammars to regular languages, where the result is exact.

llguidance matches the regular expressions of a grammar greedily, as lexemes. A sequence of lexemes is one regular
language only if no lexeme can extend into the next one; the parse is then unique, and a pattern extracts the captures.
Leading free text, up to a stop or a token limit, is included if the next piece begins with the stop, or if there is no
next piece. Every other grammar runs on llguidance.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeGuard

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.nodes import nodes
from graftlm.core.grammar.regex import parser
from graftlm.core.grammar.schema.algebra.text_language import lengths
from guidance._ast import (
    GrammarNode,
    JoinNode,
    LiteralNode,
    RegexNode,
    RepeatNode,
    RuleNode,
    SelectNode,
)

MAX_LITERAL_CHARS = 4_000


@dataclass(frozen=True)
class Capture:
    """The assignment of group `group` of the pattern to a variable, or the append to a list."""

    name: str
    group: str
    append: bool


@dataclass(frozen=True)
class Free:
    """Free text at the beginning of a grammar.

    stop        the text that ends it. None: only the end of the output.
    max_tokens  limit of its tokens; `rest` follows after the last one. None: no limit.
    rest        the language after it, which begins with `stop`. None: nothing, and the stop itself is not shown.
    """

    stop: str | None
    max_tokens: int | None
    rest: nodes.Node | None


@dataclass(frozen=True, eq=False)
class Regular:
    """A grammar as one regular language, generated at one temperature; `pattern` extracts its captures."""

    node: nodes.Node
    pattern: re.Pattern[str]
    captures: tuple[Capture, ...]
    temperature: float
    free: Free | None = None

    def read(self, text: bytes) -> dict[str, bytes | list[bytes]]:
        """Return the captures in a text of the language; free text can end within a character."""
        found = self.pattern.fullmatch(text.decode(errors="surrogateescape"))
        assert found is not None, "the automaton let through what the pattern does not match"
        values: dict[str, bytes | list[bytes]] = {}
        for capture in self.captures:
            value = (found.group(capture.group) or "").encode(errors="surrogateescape")
            if capture.append:
                old = values.get(capture.name)
                values[capture.name] = [*(old if isinstance(old, list) else []), value]
            else:
                values[capture.name] = value
        return values


def leading_text(node: GrammarNode) -> tuple[str, GrammarNode]:
    """Return the literals at the beginning of a join, and the remaining node."""
    if not isinstance(node, JoinNode):
        return "", node
    parts = list(_flat(node))
    text = ""
    while len(parts) > 1 and isinstance(first := parts[0], LiteralNode):
        text += first.value
        del parts[0]
    return (text, parts[0] if len(parts) == 1 else JoinNode(tuple(parts))) if text else ("", node)


@lru_cache(maxsize=2048)
def lower(node: GrammarNode) -> Regular | None:
    """Return the regular language of a grammar; None if it needs llguidance."""
    try:
        return _Lowering().lower(node)
    except (_NotRegular, GrammarError, re.error, RecursionError):
        return None


class _NotRegular(Exception):
    """The grammar is not regular, or its parse is not unique."""


class _Lowering:
    def __init__(self) -> None:
        self._captures: list[Capture] = []
        self._temperatures: set[float] = set()

    def lower(self, node: GrammarNode) -> Regular:
        pieces = list(_flat(node))
        first = pieces[0] if pieces else None
        begins = self._free(first) if _is_free(first) else None
        pieces = pieces if begins is None else pieces[1:]
        parts = [self._part(part) for part in pieces]
        for (before, _), (after, _) in zip(parts, parts[1:], strict=False):
            if not _apart(before, after):
                raise _NotRegular
        if not self._temperatures or len(self._temperatures) > 1:
            raise _NotRegular  # text alone needs no engine; several temperatures need llguidance
        pattern = "".join(text for _, text in parts)
        language = nodes.concat(*(part for part, _ in parts))
        free = None
        if begins is not None:
            rule, text = begins
            stop = None if rule.stop is None else _stop_text(rule.stop)
            free = Free(stop, rule.max_tokens, language if parts else None)
            pattern, language = text + pattern, _behind_free_text(stop, pieces, parts)
        read = re.compile(pattern, re.DOTALL)
        return Regular(language, read, tuple(self._captures), self._temperatures.pop(), free)

    def _free(self, rule: RuleNode) -> tuple[RuleNode, str]:
        """Return leading free text, and the pattern that matches it up to the first stop."""
        if rule.suffix or rule.stop_capture or rule.lazy or rule.max_tokens == 0:
            raise _NotRegular
        self._temperatures.add(rule.temperature or 0.0)
        if rule.capture is None:
            return rule, "(?:.*?)"
        self._captures.append(Capture(rule.capture, "free", rule.list_append))
        return rule, "(?P<free>.*?)"

    def _part(self, node: GrammarNode) -> tuple[nodes.Node, str]:
        """Return a piece of the sequence as a language and as the text of a pattern."""
        if isinstance(node, LiteralNode):
            return nodes.literal(node.value), re.escape(node.value)
        temperature, capture, value = 0.0, None, node
        if isinstance(node, RuleNode):
            _check_rule(node)
            temperature, value = node.temperature or 0.0, node.value
            if node.capture is not None:
                capture = Capture(node.capture, f"g{len(self._captures)}", node.list_append)
                self._captures.append(capture)
        self._temperatures.add(temperature)
        language = _language(value)
        pattern = _pattern(language)
        return language, f"(?P<{capture.group}>{pattern})" if capture is not None else f"(?:{pattern})"


def _is_free(node: GrammarNode | None) -> TypeGuard[RuleNode]:
    return isinstance(node, RuleNode) and isinstance(node.value, RegexNode) and node.value.regex is None


def _stop_text(stop: GrammarNode) -> str:
    """Return a stop of one byte; a longer one would require holding back its first bytes."""
    if not isinstance(stop, LiteralNode) or len(stop.value.encode()) != 1:
        raise _NotRegular
    return stop.value


def _behind_free_text(stop: str | None, pieces: list[GrammarNode], parts: list[tuple[nodes.Node, str]]) -> nodes.Node:
    """Return the language of free text followed by the other pieces."""
    if stop is None:
        if pieces:
            raise _NotRegular  # free text without a stop could extend into the next piece
        return nodes.star(nodes.ANY_CHAR)
    text, first = nodes.star(nodes.not_chars(stop)), pieces[0] if pieces else None
    if first is None:
        return nodes.concat(text, nodes.literal(stop))
    if not isinstance(first, LiteralNode) or not first.value.startswith(stop):
        raise _NotRegular
    return nodes.concat(text, *(part for part, _ in parts))


def _flat(node: GrammarNode) -> Iterator[GrammarNode]:
    """Yield the pieces of nested joins, in order."""
    if isinstance(node, JoinNode):
        for inner in node.nodes:
            yield from _flat(inner)
    elif not node.is_null:
        yield node


def _check_rule(rule: RuleNode) -> None:
    if rule.max_tokens is not None or rule.stop or rule.suffix or rule.stop_capture or rule.lazy:
        raise _NotRegular


def _language(node: GrammarNode) -> nodes.Node:
    match node:
        case LiteralNode(value):
            if len(value) > MAX_LITERAL_CHARS:
                raise _NotRegular
            return nodes.literal(value)
        case RegexNode(str(pattern)):
            return parser.parse(pattern)
        case SelectNode(alternatives):
            return nodes.alternation(*map(_language, alternatives))
        case JoinNode(parts):
            inner = [_language(one) for one in parts if not one.is_null]
            if not all(_apart(a, b) for a, b in zip(inner, inner[1:], strict=False)):
                raise _NotRegular
            return nodes.concat(*inner)
        case RepeatNode(inner, minimum, maximum):
            item = _language(inner)
            if not _fixed(item):
                raise _NotRegular
            return nodes.repeat(item, minimum, maximum)
        case RuleNode(value=value, capture=None, temperature=None):
            _check_rule(node)
            return _language(value)
    raise _NotRegular


def _apart(before: nodes.Node, after: nodes.Node) -> bool:
    """Return True if no text of `before` can be extended by a first character of `after`."""
    return _fixed(before) or not nodes.intersect(_alphabet(before), _first(after))


def _fixed(node: nodes.Node) -> bool:
    """Return True if all texts of `node` have the same length, so that none is a proper prefix of another."""
    low, high = lengths(node)
    return low == high


def _alphabet(node: nodes.Node) -> tuple[nodes.Range, ...]:
    """Return all characters in the texts of `node`."""
    match node:
        case nodes.Empty():
            return ()
        case nodes.Literal(data):
            return nodes.normalise((ord(c), ord(c)) for c in data.decode())
        case nodes.CharSet(ranges):
            return ranges
        case nodes.Concat(items) | nodes.Alternation(items):
            return nodes.normalise(one for item in items for one in _alphabet(item))
        case nodes.Repeat(item):
            return _alphabet(item)
    raise _NotRegular


def _first(node: nodes.Node) -> tuple[nodes.Range, ...]:
    """Return the first characters of the texts of `node`. A nullable node is not supported."""
    if nodes.nullable(node):
        raise _NotRegular
    match node:
        case nodes.Literal(data):
            first = ord(data.decode()[0])
            return ((first, first),)
        case nodes.CharSet(ranges):
            return ranges
        case nodes.Concat(items):
            return _first(items[0])
        case nodes.Alternation(items):
            return nodes.normalise(one for item in items for one in _first(item))
        case nodes.Repeat(item):
            return _first(item)
    raise _NotRegular


def _pattern(node: nodes.Node) -> str:
    """Return `node` in the syntax of `re`."""
    match node:
        case nodes.Empty():
            return ""
        case nodes.Literal(data):
            return re.escape(data.decode())
        case nodes.CharSet(ranges):
            return "[" + "".join(f"\\U{low:08x}-\\U{high:08x}" for low, high in ranges) + "]"
        case nodes.Concat(items):
            return "".join(map(_pattern, items))
        case nodes.Alternation(items):
            return "(?:" + "|".join(map(_pattern, items)) + ")"
        case nodes.Repeat(item, minimum, maximum):
            return f"(?:{_pattern(item)}){{{minimum},{'' if maximum is None else maximum}}}"
    raise _NotRegular
