"""What the readers of both notations have in common: tokens from left to right, and nodes for what a rule says."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NoReturn

from graftlm.core.grammar import ast
from graftlm.core.grammar.ast import Node
from graftlm.core.grammar.budget import check
from graftlm.core.grammar.definitions.definitions import Definitions
from graftlm.core.grammar.definitions.tokens import Token, fail

_MAX_COUNT = 1 << 24
_MAX_NESTING = 29  # of groups: llguidance's own limit


class Reader(ABC):
    """Reads tokens from left to right. Raises GrammarError with line and column of what cannot be read."""

    def __init__(self, text: str, tokens: list[Token], start: str) -> None:
        self._text = text
        self._tokens = tokens
        self._next = 0
        self._rule = ""  # whose body is read
        self._nesting = 0
        self._found = Definitions(text, start)

    @property
    def _here(self) -> Token:
        return self._tokens[self._next]

    def _is(self, kind: str, text: str | None = None) -> bool:
        token = self._here
        return token.kind == kind and (text is None or token.text == text)

    def _take(self, kind: str, text: str | None = None) -> Token | None:
        if not self._is(kind, text):
            return None
        self._next += 1
        return self._tokens[self._next - 1]

    def _expect(self, kind: str, text: str | None, wanted: str) -> Token:
        return self._take(kind, text) or self._fail(f"{self._shown()} stands where {wanted} should")

    def _shown(self) -> str:
        token = self._here
        if token.kind == "end":
            return "the end of the grammar"
        return "the end of the line" if token.kind == "newline" else repr(token.text[:40])

    def _fail(self, reason: str, at: int | None = None) -> NoReturn:
        fail(self._text, self._here.at if at is None else at, reason)

    def _named(self, token: Token) -> Node:
        """A reference to a rule."""
        self._found.use(self._rule, token.text, token.at, self._nesting)
        return ast.Rule(token.text)

    def _group(self, opening: Token, closing: str) -> Node:
        """The body of a group, behind its opening bracket, and the closing one."""
        check()
        self._nesting += 1
        if self._nesting > _MAX_NESTING:
            self._fail(f"groups nest deeper than {_MAX_NESTING}; give the inner ones rules of their own", opening.at)
        found = self._alternatives()
        self._nesting -= 1
        if self._take("mark", closing) is None:
            self._fail(f"{opening.text!r} is not closed: {self._shown()} stands where {closing!r} should", opening.at)
        return found

    @abstractmethod
    def _alternatives(self) -> Node:
        """The body of a rule or a group."""

    def _counted(self, item: Node, low: int, high: int | None, at: int) -> Node:
        """`item` repeated as braces say."""
        if low < 0:
            self._fail("a repeat count is below 0; write {0,} or *", at)
        if max(low, high or 0) > _MAX_COUNT:
            self._fail(f"a repeat count is above {_MAX_COUNT:,}; leave the upper bound open", at)
        if high is not None and high < low:
            self._fail(f"the repeat {{{low},{high}}} has its minimum above its maximum; swap them", at)
        if high == 0:
            self._fail('a repeat of at most 0 is the empty text; write ""', at)
        return ast.repeat(item, low, high)

    def _braces(self, item: Node, opening: Token) -> Node:
        """`item` repeated by the counts between braces, the first of which was just read."""
        low, comma = self._take("number"), self._take("mark", ",")
        high = self._take("number") if comma else low
        self._expect("mark", "}", "the } of a repeat, as in {3}, {2,} or {2,5},")
        if low is None and comma is None:
            self._fail("a repeat holds counts, as in {3}, {2,} or {2,5}", opening.at)
        return self._counted(item, int(low.text) if low else 0, int(high.text) if high else None, opening.at)


REPEATS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
