r"""Grammars in EBNF as GBNF and xgrammar write it.

    root ::= "text" name [a-z^] [^...] . (group | other) name* name+ name? name{2,5}   # a comment

Escapes are \n \r \t \" \\ \[ \] \- \x41 \u0041 \U00000041. A rule goes on until the next one begins.
"""

from __future__ import annotations

import re

from graftlm.core.grammar import ast
from graftlm.core.grammar.ast import Node, Range
from graftlm.core.grammar.definitions.definitions import Definitions
from graftlm.core.grammar.definitions.reader import REPEATS, Reader
from graftlm.core.grammar.definitions.tokens import Token, tokenise

_NOTATION = re.compile(
    r"""(?P<skip>\s+|\#[^\n]*)|(?P<defines>::=)|(?P<string>"(?:\\.|[^"\\\n])*")|(?P<set>\[(?:\\.|[^\]\\\n])*\])
    |(?P<number>[0-9]+(?![\w-]))|(?P<name>[A-Za-z0-9_](?:[\w-])*)|(?P<repeat>[*+?])|(?P<mark>[(){},|.])
    |(?P<special><[^<>\s]+>)""",
    re.VERBOSE,
)
_RULE = re.compile(r"^[ \t]*[A-Za-z0-9_][\w-]*\s*::=", re.MULTILINE)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"} | {char: char for char in "\"'\\[]-/^"}
_HEX = {"x": 2, "u": 4, "U": 8}


def is_ebnf(text: str) -> bool:
    """Whether a grammar's text is EBNF, and not Lark, which has no `::=`."""
    return _RULE.search(text) is not None


def read_ebnf(text: str) -> Definitions:
    """What `text` defines. Raises GrammarError with line and column of what cannot be read or kept."""
    return _EbnfReader(text, tokenise(text, _NOTATION), "root").read()


class _EbnfReader(Reader):
    def read(self) -> Definitions:
        while not self._is("end"):
            name = self._expect("name", None, 'a rule, as in name ::= "text",')
            self._expect("defines", None, "the ::= of a rule")
            self._rule = name.text
            self._found.define(name.text, self._alternatives(), name.at)
            if not self._is("end") and not self._begins_rule():
                self._fail(f"{self._shown()} begins nothing here; a rule is name ::= ..., text stands in double quotes")
        return self._found.checked()

    def _begins_rule(self) -> bool:
        return self._is("name") and self._tokens[self._next + 1].kind == "defines"

    def _alternatives(self) -> Node:
        ways = [self._sequence()]
        while self._take("mark", "|"):
            ways.append(self._sequence())
        return ast.alternation(*ways)

    def _sequence(self) -> Node:
        items: list[Node] = []
        while not self._begins_rule() and (item := self._item()) is not None:
            items.append(self._repeated(item))
        return ast.concat(*items)

    def _repeated(self, item: Node) -> Node:
        if sign := self._take("repeat"):
            item = ast.repeat(item, *REPEATS[sign.text])
        elif opening := self._take("mark", "{"):
            item = self._braces(item, opening)
        else:
            return item
        if self._is("repeat") or self._is("mark", "{"):
            self._fail("a repeat of a repeat; put the first one in parentheses")
        return item

    def _item(self) -> Node | None:
        if token := self._take("string"):
            return ast.literal("".join(self._characters(token, 1)))
        if token := self._take("set"):
            return self._set(token)
        if token := self._take("name") or self._take("number"):
            return self._named(token)
        if self._take("mark", "."):
            return ast.ANY_CHAR
        if token := self._take("mark", "("):
            return self._group(token, ")")
        if self._is("special"):
            self._fail(
                f"{self._here.text} would be a token of the vocabulary, which EBNF cannot name here; "
                "write its text in double quotes"
            )
        if self._is("repeat") or self._is("mark", "{"):
            self._fail("there is nothing to repeat before the quantifier; put text in double quotes")
        return None

    def _set(self, token: Token) -> Node:
        negated = token.text[1] == "^"
        chars = self._characters(token, 1 + negated)
        plain = self._dashes(token, 1 + negated)
        ranges: list[Range] = []
        at = 0
        while at < len(chars):
            low = high = ord(chars[at])
            if at + 2 < len(chars) and plain[at + 1]:
                high = ord(chars[at + 2])
                if high < low:
                    self._fail(f"the range {chars[at]}-{chars[at + 2]} runs backwards; swap its ends", token.at)
                at += 2
            ranges.append((low, high))
            at += 1
        if not ranges and not negated:
            self._fail('the class [] matches no character; write "" for the empty text', token.at)
        return ast.char_set(ast.complement(ranges) if negated else ranges)

    def _dashes(self, token: Token, begin: int) -> list[bool]:
        """For each character of a class whether it is a dash that was not escaped."""
        return [text == "-" for text, _ in self._parts(token, begin)]

    def _characters(self, token: Token, begin: int) -> list[str]:
        """The characters between the quotes or brackets of `token`."""
        return [char for _, char in self._parts(token, begin)]

    def _parts(self, token: Token, begin: int) -> list[tuple[str, str]]:
        """The same, each with how it is written."""
        text, at, found = token.text, begin, list[tuple[str, str]]()
        while at < len(text) - 1:
            start = at
            if text[at] != "\\":
                char, at = text[at], at + 1
            elif text[at + 1] in _HEX:
                char, at = self._hexadecimal(token, at)
            elif text[at + 1] in _ESCAPES:
                char, at = _ESCAPES[text[at + 1]], at + 2
            else:
                self._fail(
                    f"{text[at : at + 2]} is no known escape; write {text[at + 1]} alone, or \\\\ for the \\",
                    token.at + at,
                )
            found.append((text[start:at], char))
        return found

    def _hexadecimal(self, token: Token, at: int) -> tuple[str, int]:
        letter, text = token.text[at + 1], token.text
        end = at + 2 + _HEX[letter]
        digits = text[at + 2 : end]
        if not re.fullmatch(f"[0-9a-fA-F]{{{_HEX[letter]}}}", digits):
            self._fail(f"\\{letter} needs {_HEX[letter]} hexadecimal digits", token.at + at)
        code = int(digits, 16)
        if code > ast.MAX_CODE_POINT or 0xD800 <= code <= 0xDFFF:
            self._fail(f"\\{letter}{digits} is no character that UTF-8 can write; remove it", token.at + at)
        return chr(code), end
