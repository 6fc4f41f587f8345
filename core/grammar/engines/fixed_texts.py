"""Fixed texts: parts of a language without any choice, which llguidance writes out in one step, unasked."""

from __future__ import annotations

from collections.abc import Mapping

from graftlm.core.errors import GrammarError
from graftlm.core.grammar import ast
from graftlm.core.grammar.ast import Node

MAX_FIXED = 1 << 17
"""Bytes of such a part, about a second's work."""
_PLAIN = frozenset({ast.Literal, ast.Empty, ast.CharSet})
"""Kinds of nodes that name no rule."""


def check_fixed_texts(node: Node, rules: Mapping[str, Node]) -> None:
    """Raise GrammarError where a text of `node` has more than MAX_FIXED bytes in a row that cannot be otherwise."""
    _FixedTexts(rules).length(node)


class _FixedTexts:
    def __init__(self, rules: Mapping[str, Node]) -> None:
        self._rules = rules
        self._of_rule: dict[str, int | None] = {  # most are names of members
            name: len(body.data) for name, body in rules.items() if type(body) is ast.Literal
        }
        self._known: dict[int, int | None] = {}  # by id: nodes outlive this object

    def length(self, node: Node) -> int | None:
        """Bytes of the only text of `node`; None where it has several, or none."""
        if type(node) is ast.Rule:
            name, known = node.name, self._of_rule
            if name not in known:
                known[name] = None  # what contains itself has several texts, or no end
                if name in self._rules:
                    known[name] = self.length(self._rules[name])
            return known[name]
        if type(node) is ast.Literal:
            return len(node.data)
        if type(node) is ast.CharSet:
            return None
        key = id(node)
        if key not in self._known:
            self._known[key] = self._composed(node)
        return self._known[key]

    def _composed(self, node: Node) -> int | None:
        if isinstance(node, ast.Concat):
            return self._row(node.items)
        if isinstance(node, ast.Alternation):
            lengths = list(map(self.length, node.items))
            return lengths[0] if len(lengths) == 1 else None
        if isinstance(node, ast.Repeat):
            length = self.length(node.item)
            if length is None:
                return None
            _check(node.min * length)
            return node.min * length if node.min == node.max else None
        if isinstance(node, ast.Graph):
            known = self._of_rule
            for row in node.rows:
                for item, _ in row:
                    if type(item) is ast.Concat:  # most are nowhere else
                        self._row(item.items)
                    elif type(item) is ast.Rule:
                        if item.name not in known:
                            self.length(item)
                    elif type(item) not in _PLAIN:
                        self.length(item)
        return 0 if isinstance(node, ast.Empty) else None

    def _row(self, items: tuple[Node, ...]) -> int | None:
        """The length of all, one after the other."""
        total = longest = 0
        is_fixed, known = True, self._of_rule
        for item in items:
            length = known[name] if type(item) is ast.Rule and (name := item.name) in known else self.length(item)
            if length is None:
                is_fixed, total = False, 0
            else:
                total += length
                if total > longest:
                    longest = total
        if longest > MAX_FIXED:
            _check(longest)
        return total if is_fixed else None


def _check(num_bytes: int) -> None:
    if num_bytes > MAX_FIXED:
        raise GrammarError(
            f"{num_bytes:,} bytes or more of the text cannot be otherwise, the limit in a context-free grammar is "
            f"{MAX_FIXED:,}; lower minItems, or let fewer definitions name others several times"
        )
