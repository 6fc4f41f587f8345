"""Fixed texts: parts of a language without any choice, which llguidance writes out in one step, unasked."""

from __future__ import annotations

from collections.abc import Mapping

from graftlm.core.errors import GrammarError
from graftlm.core.grammar import ast
from graftlm.core.grammar.ast import Node

MAX_FIXED = 1 << 17
"""Bytes of such a part, about a second's work."""


def check_fixed_texts(node: Node, rules: Mapping[str, Node]) -> None:
    """Raise GrammarError where a text of `node` has more than MAX_FIXED bytes in a row that cannot be otherwise."""
    _FixedTexts(rules).length(node)


class _FixedTexts:
    def __init__(self, rules: Mapping[str, Node]) -> None:
        self._rules = rules
        self._of_rule: dict[str, int | None] = {}
        self._known: dict[int, int | None] = {}  # by id: nodes outlive this object

    def length(self, node: Node) -> int | None:
        """Bytes of the only text of `node`; None where it has several, or none."""
        match node:
            case ast.Empty():
                return 0
            case ast.Literal(data):
                return len(data)
            case ast.Rule(name):
                if name not in self._of_rule and name in self._rules:
                    self._of_rule[name] = None  # what contains itself has several texts, or no end
                    self._of_rule[name] = self.length(self._rules[name])
                return self._of_rule.get(name)
            case ast.Concat() | ast.Alternation() | ast.Repeat() | ast.Graph():
                if id(node) not in self._known:
                    self._known[id(node)] = self._composed(node)
                return self._known[id(node)]
            case _:
                return None

    def _composed(self, node: ast.Concat | ast.Alternation | ast.Repeat | ast.Graph) -> int | None:
        match node:
            case ast.Concat(items):
                return self._row([self.length(item) for item in items])
            case ast.Alternation(items):
                lengths = [self.length(item) for item in items]
                return lengths[0] if len(lengths) == 1 else None
            case ast.Repeat(item, least, most):
                length = self.length(item)
                if length is None:
                    return None
                self._row([least * length])
                return least * length if least == most else None
            case ast.Graph(rows):
                for row in rows:
                    for item, _ in row:
                        self.length(item)
                return None

    @staticmethod
    def _row(lengths: list[int | None]) -> int | None:
        """The length of all, one after the other."""
        total = longest = 0
        for length in lengths:
            total = 0 if length is None else total + length
            longest = max(longest, total)
        if longest > MAX_FIXED:
            raise GrammarError(
                f"{longest:,} bytes or more of the text cannot be otherwise, the limit in a context-free grammar is "
                f"{MAX_FIXED:,}; lower minItems, or let fewer definitions name others several times"
            )
        return None if None in lengths else total
