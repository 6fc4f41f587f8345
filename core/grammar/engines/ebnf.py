"""Nodes with rules as text in EBNF, the notation of xgrammar and GBNF."""

from __future__ import annotations

from graftlm.core.errors import GrammarError
from graftlm.core.grammar import ast
from graftlm.core.grammar.ast import Node
from graftlm.core.grammar.automata import product


def to_ebnf(node: Node, rules: dict[str, Node]) -> str:
    """The grammar that starts with `root`. Raises GrammarError for what EBNF over characters cannot say."""
    return _Writer(rules).write(node)


class _Writer:
    def __init__(self, rules: dict[str, Node]) -> None:
        self._rules = rules
        self._names = {name: f"r{i}" for i, name in enumerate(rules)}
        self._lines: list[str] = []
        self._num_fresh = 0

    def write(self, node: Node) -> str:
        root = self._expression(node)
        bodies = [f"{self._names[name]} ::= {self._expression(body)}" for name, body in self._rules.items()]
        return "\n".join([f"root ::= {root}", *bodies, *self._lines]) + "\n"

    def _expression(self, node: Node) -> str:
        match node:
            case ast.Empty():
                return '""'
            case ast.Literal(data):
                return f'"{"".join(_char(ord(char)) for char in _decoded(data))}"'
            case ast.CharSet(ranges):
                return _set(ranges)
            case ast.Concat(items):
                return " ".join(f"({self._expression(item)})" for item in items)
            case ast.Alternation(items) if items:
                return " | ".join(f"({self._expression(item)})" for item in items)
            case ast.Repeat(item, minimum, maximum):
                count = {(0, 1): "?", (0, None): "*", (1, None): "+"}.get((minimum, maximum))
                bounds = f"{{{minimum},{'' if maximum is None else maximum}}}"
                return f"({self._expression(item)}){count or bounds}"
            case ast.Series():
                return self._series(node)
            case ast.Intersection() | ast.Difference():
                return self._automaton(product.product(node))
            case ast.Automaton():
                return self._automaton(node)
            case ast.Rule(name):
                if name not in self._names:
                    raise GrammarError(f"there is no rule {name!r}; give it along with the node that names it")
                return self._names[name]
            case _:
                raise GrammarError("a part of the constraint matches no text, which EBNF cannot say; remove it")

    def _series(self, node: ast.Series) -> str:
        separator = self._expression(node.separator)
        first, later, last = "", "", len(node.items) - 1
        for i in range(last, -1, -1):
            item, endless = node.items[i]
            value = f"({self._expression(item)})"
            many = f"{value} (({separator}) {value})*" if endless else value
            rest = f" {later}" if later else ""
            skip_first = first or ("" if node.nonempty else '""')
            first = self._rule(" | ".join([f"{many}{rest}", *([skip_first] if skip_first else [])]))
            skip_later = later or '""'
            later = self._rule(f"({separator}) {many}{rest} | {skip_later}")
        return first

    def _automaton(self, node: ast.Automaton) -> str:
        if not node.accepting:
            raise GrammarError("a part of the constraint matches no text, which EBNF cannot say; remove it")
        names = [self._fresh() for _ in node.rows]
        for state, row in enumerate(node.rows):
            if any(high > 0x7F for _, high, _ in row):
                raise GrammarError("a combination of patterns beyond ASCII cannot be written in EBNF; use one of them")
            ways = [f"{_set(((low, high),))} {names[target]}" for low, high, target in row]
            ways += ['""'] if state in node.accepting else []
            self._lines.append(f"{names[state]} ::= {' | '.join(ways)}")
        return names[0]

    def _rule(self, body: str) -> str:
        name = self._fresh()
        self._lines.append(f"{name} ::= {body}")
        return name

    def _fresh(self) -> str:
        self._num_fresh += 1
        return f"s{self._num_fresh}"


def _decoded(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise GrammarError(f"{data!r} is not UTF-8, which EBNF needs; use whole characters") from error


def _set(ranges: tuple[ast.Range, ...]) -> str:
    whole = ast.intersect(ranges, ast.complement(((0xD800, 0xDFFF),)))
    return f"[{''.join(_char(low) if low == high else f'{_char(low)}-{_char(high)}' for low, high in whole)}]"


def _char(code: int) -> str:
    char = chr(code)
    if char.isascii() and char.isalnum():
        return char
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
