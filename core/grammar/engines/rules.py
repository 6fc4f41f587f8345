"""The text of a context-free grammar in the notation of llguidance (Lark)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from graftlm.core.errors import GrammarError
from graftlm.core.grammar import ast
from graftlm.core.grammar.ast import Node
from graftlm.core.grammar.budget import check

_RULES_PER_CHECK = 16
"""Rules between two looks at the clock."""


class RuleWriter(ABC):
    """Writes one node and the rules that it names, one rule per line."""

    START: ClassVar[str]
    DEFINES: ClassVar[str]  # what stands between the name and the body of a rule

    def __init__(self, rules: dict[str, Node]) -> None:
        self._rules = rules
        self._names = {name: f"r{i}" for i, name in enumerate(rules)}
        self._written: dict[str, str] = {}  # how a rule is named in bodies
        self._bodies: list[str] = []
        self._lines: list[str] = []
        self._num_fresh = self._num_defined = 0

    def write(self, node: Node) -> str:
        start = self._body(node)
        for name, body in self._rules.items():
            if not self._is_inlined(body):
                self._add(name, self._body(body))
        return "\n".join([self._line(self.START, start), *self._bodies, *self._lines]) + "\n"

    def _add(self, name: str, body: str) -> None:
        """Write a rule that has a name in the grammar."""
        self._bodies.append(self._line(self._names[name], body))

    @abstractmethod
    def _body(self, node: Node) -> str:
        """`node` as the body of a rule; may add lines."""

    @abstractmethod
    def _set(self, ranges: tuple[ast.Range, ...]) -> str:
        """One character of `ranges`, in the body of a rule."""

    def _is_inlined(self, body: Node) -> bool:
        """Whether a rule is written where it is named, and gets no line."""
        return False

    def _line(self, name: str, body: str) -> str:
        return f"{name}{self.DEFINES}{body}"

    def define(self, name: str, *ways: str) -> None:
        self._num_defined += 1
        if not self._num_defined % _RULES_PER_CHECK:
            check()
        self._lines.append(f"{name}{self.DEFINES}{'|'.join(ways)}")

    def fresh(self) -> str:
        self._num_fresh += 1
        return f"s{self._num_fresh}"

    def _named(self, name: str) -> str:
        if name not in self._names:
            known = ", ".join(self._names) or "none"
            raise GrammarError(f"there is no rule {name!r}; give it along with the node that names it (given: {known})")
        if name not in self._written:
            body = self._rules[name]
            self._written[name] = self._body(body) if self._is_inlined(body) else self._names[name]
        return self._written[name]

    def _graph(self, node: ast.Graph) -> str:
        """One rule for each state, which says how the walk goes on."""
        names = [self.fresh() for _ in node.rows]
        for state, row in enumerate(node.rows):
            ways = [names[to] if item == ast.EMPTY else f"{grouped(self._body(item))} {names[to]}" for item, to in row]
            self.define(names[state], *ways, *(['""'] if state in node.accepting else []))
        return names[0]

    def _automaton(self, node: ast.Automaton) -> str:
        """One rule for each state; only for ASCII, since the notations know whole characters and no bytes."""
        names = [self.fresh() for _ in node.rows]
        for state, row in enumerate(node.rows):
            if any(high > 0x7F for _, high, _ in row):
                raise GrammarError(
                    "a combination of patterns beyond ASCII inside a constraint that contains itself cannot be kept; "
                    "use one pattern instead of several"
                )
            ways = [f"{self._set(((low, high),))} {names[target]}" for low, high, target in row]
            self.define(names[state], *ways, *(['""'] if state in node.accepting else []))
        return names[0]


def grouped(text: str) -> str:
    """`text` as one item of a body: in parentheses unless it is a name."""
    return text if text.replace("_", "").isalnum() else f"({text})"


def quantifier(minimum: int, maximum: int | None) -> str:
    """`?`, `*`, `+` or `{m,n}`."""
    short = {(0, 1): "?", (0, None): "*", (1, None): "+"}.get((minimum, maximum))
    return short or f"{{{minimum},{'' if maximum is None else maximum}}}"


def decoded(data: bytes) -> str:
    """`data` as text. Raises GrammarError when it is not UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise GrammarError(
            f"{data!r} is not UTF-8, which a context-free grammar needs; use whole characters"
        ) from error


def without_surrogates(ranges: tuple[ast.Range, ...]) -> tuple[ast.Range, ...]:
    """`ranges` without the code points that UTF-8 cannot write."""
    return ast.intersect(ranges, ast.complement(((0xD800, 0xDFFF),)))
