r"""Patterns in the dialect of Rust's regex crate, as far as they read the same in Python's or are told apart here.

\d, \w and \s take what Rust takes for them. What means something else there than here, or nothing here, is Untold.
"""

from __future__ import annotations

import re
from functools import cache

from graftlm.core.grammar import ast
from graftlm.core.grammar.ast import Node, Range
from graftlm.core.grammar.automata.charsets import property_ranges
from graftlm.core.grammar.regex import regex

_SAFE_ESCAPES = frozenset("nrtfav\\.+*?()|[]{}^$#&-~/\"'` !%,:;=@_")
_FLAGS = frozenset("is")


class Untold(Exception):
    """The pattern has a part that is not read here; its text says which."""


def read_regex(pattern: str, flags: str = "") -> Node:
    """The texts of `pattern`. Raises Untold for what is not read here, GrammarError for what no dialect takes."""
    if not set(flags) <= _FLAGS:
        raise Untold(f"the flags {flags!r}")
    found = _Translated(pattern).text
    return regex.parse(f"(?{flags}:{found})" if flags else found)


class _Translated:
    """A pattern of Rust's dialect in Python's."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        parts = []
        while self._at < len(pattern):
            parts.append(self._part())
        self.text = "".join(parts)

    def _part(self) -> str:
        char = self._pattern[self._at]
        if char == "\\":
            return self._escape(in_class=False)
        if char == "[":
            return self._class()
        if char in "^$":
            raise Untold(f"the anchor {char}")
        if char in "*+?}" and self._pattern[self._at + 1 : self._at + 2] in ("?", "+"):
            raise Untold("a lazy or possessive repeat")
        if char == "{" and not re.compile(r"\{[0-9]+(,[0-9]*)?\}").match(self._pattern, self._at):
            raise Untold("a brace that counts nothing")
        if self._pattern.startswith("(?", self._at):
            opening = re.compile(r"\(\?(?:[is]*(?:-[is]+)?:|P?<[A-Za-z_]\w*>)", re.ASCII).match(self._pattern, self._at)
            leading = re.compile(r"\(\?[is]+\)").match(self._pattern) if self._at == 0 else None
            found = opening or leading
            if found is None:
                raise Untold(self._pattern[self._at : self._at + 4])
            self._at = found.end()
            return found.group()
        self._at += 1
        return char

    def _escape(self, *, in_class: bool) -> str:
        char = self._pattern[self._at + 1 : self._at + 2]
        if char and char in "dDwWsS":
            self._at += 2
            return _members(char) if in_class else f"[{_members(char)}]"
        code = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8})").match(self._pattern, self._at)
        if code is not None:
            self._at = code.end()
            return code.group()
        if not char or char not in _SAFE_ESCAPES:
            raise Untold(f"\\{char}")
        self._at += 2
        return f"\\{char}"

    def _class(self) -> str:
        begin = self._at
        self._at += 1
        parts = ["["]
        if self._pattern.startswith("^", self._at):
            self._at += 1
            parts.append("^")
        first = self._at
        while self._at < len(self._pattern):
            char, pair = self._pattern[self._at], self._pattern[self._at : self._at + 2]
            if char == "]":
                if self._at == first:
                    raise Untold("a class that begins with ]")
                self._at += 1
                return "".join(parts) + "]"
            if char == "[" or pair in ("&&", "--", "~~"):
                raise Untold("operations on classes")
            if char == "\\":
                parts.append(self._escape(in_class=True))
            else:
                parts.append(char)
                self._at += 1
        raise Untold(self._pattern[begin : begin + 10])


@cache
def _members(letter: str) -> str:
    r"""What Rust takes for \d, \w or \s, or their capitals, as the inside of a class."""
    return "".join(f"\\U{low:08x}" if low == high else f"\\U{low:08x}-\\U{high:08x}" for low, high in _ranges(letter))


def _ranges(letter: str) -> tuple[Range, ...]:
    def of(*names: str) -> list[Range]:
        return [span for name in names for span in property_ranges(name) or ()]

    if letter == "d":
        return ast.normalise(of("Nd"))
    if letter == "s":
        return ast.normalise([(9, 13), (0x20, 0x20), (0x85, 0x85), *of("Z")])
    circled = [(0x24B6, 0x24E9), (0x1F130, 0x1F149), (0x1F150, 0x1F169), (0x1F170, 0x1F189)]  # symbols, yet letters
    return ast.normalise([*of("L", "M", "Nd", "Nl", "Pc"), (0x200C, 0x200D), *circled])
