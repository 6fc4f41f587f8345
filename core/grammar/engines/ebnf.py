"""Nodes with rules as text in EBNF, the notation of xgrammar and GBNF."""

from __future__ import annotations

from graftlm.core.errors import GrammarError
from graftlm.core.grammar import ast
from graftlm.core.grammar.ast import Node
from graftlm.core.grammar.automata.products.product import product
from graftlm.core.grammar.engines.rules import RuleWriter, decoded, quantifier, without_surrogates


def to_ebnf(node: Node, rules: dict[str, Node]) -> str:
    """The grammar that starts with `root`. Raises GrammarError for what EBNF over characters cannot express."""
    return _EbnfWriter(rules).write(node)


class _EbnfWriter(RuleWriter):
    START = "root"
    DEFINES = " ::= "

    def _body(self, node: Node) -> str:
        match node:
            case ast.Empty():
                return '""'
            case ast.Literal(data):
                return f'"{"".join(_char(ord(char)) for char in decoded(data))}"'
            case ast.CharSet(ranges):
                return self._set(ranges)
            case ast.Concat(items):
                return " ".join(f"({self._body(item)})" for item in items)
            case ast.Alternation(items) if items:
                return " | ".join(f"({self._body(item)})" for item in items)
            case ast.Repeat(item, minimum, maximum):
                return f"({self._body(item)}){quantifier(minimum, maximum)}"
            case ast.Graph():
                return self._graph(node)
            case ast.Intersection() | ast.Difference():
                return self._body(product(node))
            case ast.Automaton() if node.accepting:
                return self._automaton(node)
            case ast.Rule(name):
                return self._named(name)
            case _:
                raise GrammarError("a part of the constraint matches no text, which EBNF cannot express; remove it")

    def _set(self, ranges: tuple[ast.Range, ...]) -> str:
        whole = without_surrogates(ranges)
        return f"[{''.join(_char(low) if low == high else f'{_char(low)}-{_char(high)}' for low, high in whole)}]"


def _char(code: int) -> str:
    char = chr(code)
    if char.isascii() and char.isalnum():
        return char
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
