"""Nodes with rules as the text of a context-free grammar, in llguidance's dialect of Lark.

What is regular becomes terminals: llguidance runs them as automata and parses only between them. Where several
terminals can stand, its lexer takes the longest match and never backtracks.
"""

from __future__ import annotations

import re
from functools import lru_cache

from graftlm.core.errors import GrammarError
from graftlm.core.grammar import ast
from graftlm.core.grammar.ast import Node
from graftlm.core.grammar.automata.product import product
from graftlm.core.grammar.budget import check
from graftlm.core.grammar.engines.rules import RuleWriter, decoded, grouped, quantifier, without_surrogates

MAX_STATES = 1_000  # each state of a walk nests inside the one before it, and llguidance's parser stack is limited


def to_lark(node: Node, rules: dict[str, Node]) -> str:
    """The grammar that starts with `node`. Raises GrammarError for what terminals and rules cannot express."""
    return _LarkWriter(rules).write(node)


class _LarkWriter(RuleWriter):
    START = "start"
    DEFINES = ":"

    def __init__(self, rules: dict[str, Node]) -> None:
        super().__init__(rules)
        self._terminals: dict[Node, str] = {}
        self._uses: dict[int, tuple[Node, str]] = {}
        self._regular: dict[int, tuple[Node, bool]] = {}  # by id, with the node so that the id stays its own

    def _body(self, node: Node) -> str:
        """`node` as an expression of rules and terminals."""
        if isinstance(node, ast.Rule):
            return self._named(node.name)
        if self._is_regular(node):
            return self._terminal_use(node)
        if isinstance(node, ast.Concat):
            return self._concat(self._runs(node.items))
        if isinstance(node, ast.Repeat):
            return f"{grouped(self._body(node.item))}{quantifier(node.min, node.max)}"
        if isinstance(node, ast.Alternation):
            regular = [item for item in node.items if self._is_regular(item)]
            others = [item for item in node.items if not self._is_regular(item)]
            merged = [ast.alternation(*regular)] if regular else []
            return " | ".join(grouped(self._body(item)) for item in [*merged, *others])
        if isinstance(node, ast.Graph):
            _check_length(node)
            return self._graph(node)
        if isinstance(node, ast.Automaton):
            return self._short_automaton(node)
        assert isinstance(node, ast.Intersection | ast.Difference)
        return self._short_automaton(product(node))

    def _concat(self, runs: list[Node]) -> str:
        """A terminal takes all it can, so one that something optional follows is also written joined to it."""
        for i, (run, after) in enumerate(zip(runs, runs[1:], strict=False)):
            if isinstance(after, (ast.Alternation, ast.Repeat)) and self._is_regular(run) and not _loops(after):
                ways = after.items if isinstance(after, ast.Alternation) else (ast.EMPTY, after.item)
                return " | ".join(f"({self._body(ast.concat(*runs[:i], run, way, *runs[i + 2 :]))})" for way in ways)
        return " ".join(grouped(self._body(run)) for run in runs)

    def _short_automaton(self, node: ast.Automaton) -> str:
        if len(node.rows) > MAX_STATES:
            raise GrammarError(
                f"a combination of patterns or multiples of {len(node.rows):,} states, the limit of a context-free "
                f"grammar is {MAX_STATES:,}; combine fewer of them"
            )
        return self._automaton(node)

    def _runs(self, items: tuple[Node, ...]) -> list[Node]:
        """Join neighbours that are regular."""
        runs: list[Node] = []
        for item in items:
            if runs and self._is_regular(item) and self._is_regular(runs[-1]):
                runs[-1] = ast.concat(runs[-1], item)
            else:
                runs.append(item)
        return runs

    def _is_inlined(self, body: Node) -> bool:
        return self._is_regular(body)

    def _set(self, ranges: tuple[ast.Range, ...]) -> str:
        return f"/{_set(ranges)}/"

    def _terminal_use(self, node: Node) -> str:
        if id(node) not in self._uses:
            self._uses[id(node)] = (node, self._new_use(node))
        return self._uses[id(node)][1]

    def _new_use(self, node: Node) -> str:
        if isinstance(node, ast.Empty):
            return '""'
        name = self._terminal(node)
        if not ast.nullable(node):
            return name
        # a terminal must not match the empty text: the rule makes it optional instead
        some = f"{name}_SOME"
        line = f"{some}: {name} & /(?s:.+)/"
        if line not in self._lines:
            self._lines.append(line)
        return f"{some}?"

    def _terminal(self, node: Node) -> str:
        if node not in self._terminals:
            name = f"T{len(self._terminals)}"
            self._terminals[node] = name
            self._lines.append(f"{name}: {self._expression(node)}")
        return self._terminals[node]

    def _expression(self, node: Node) -> str:
        """`node` as the definition of a terminal: a regex, but for intersections and differences."""
        match node:
            case _ if (regex := _plain(node)) is not None:
                return regex
            case ast.Intersection(items):
                return " & ".join(self._terminal(item) for item in items)
            case ast.Difference(item, minus):
                return f"{self._terminal(item)} & ~{self._terminal(minus)}"
            case ast.Concat(items):
                return " ".join(self._terminal(item) for item in items)
            case ast.Alternation(items):
                return " | ".join(self._terminal(item) for item in items)
            case ast.Repeat(item, minimum, maximum):
                return f"{self._terminal(item)}{quantifier(minimum, maximum)}"
            case _:
                raise AssertionError(node)

    def _is_regular(self, node: Node) -> bool:
        """Whether a terminal can hold `node`; an automaton takes rules, as regexes have no states."""
        kind = type(node)
        if kind is ast.Rule or kind is ast.Graph or kind is ast.Automaton:
            return False
        if kind is ast.Literal or kind is ast.CharSet:
            return True
        key = id(node)
        if key not in self._regular:
            found = True
            if isinstance(node, ast.Concat | ast.Alternation | ast.Intersection):
                for item in node.items:
                    if not self._is_regular(item):
                        found = False
                        break
            elif isinstance(node, ast.Repeat):
                found = self._is_regular(node.item)
            elif isinstance(node, ast.Difference):
                found = self._is_regular(node.item) and self._is_regular(node.minus)
            self._regular[key] = (node, found)
        return self._regular[key][1]


def _check_length(node: ast.Graph) -> None:
    if len(node.rows) > MAX_STATES:
        raise GrammarError(
            f"an object or array of {len(node.rows):,} places, the limit of a context-free grammar is {MAX_STATES:,}; "
            "require some of its members or nest them"
        )


def _loops(node: ast.Alternation | ast.Repeat) -> bool:
    return isinstance(node, ast.Repeat) and (node.min, node.max) != (0, 1)


_SPECIAL = re.compile("[^0-9A-Za-z_ -]")


@lru_cache(maxsize=4096)
def _plain(node: Node) -> str | None:
    """`node` as one regex; None where it takes several terminals."""
    return f"/{_regex(node)}/" if _is_plain(node) else None


def _is_plain(node: Node) -> bool:
    match node:
        case ast.Intersection() | ast.Difference():
            return False
        case ast.Concat(items) | ast.Alternation(items):
            return all(map(_is_plain, items))
        case ast.Repeat(item, _, _):
            return _is_plain(item)
        case _:
            return True


def _regex(node: Node) -> str:
    match node:
        case ast.Empty():
            return ""
        case ast.Literal(data):
            return _SPECIAL.sub(lambda found: _char(ord(found[0])), decoded(data))
        case ast.CharSet(ranges):
            return _set(ranges)
        case ast.Concat(items):
            return "".join(map(_regex, items))
        case ast.Alternation(()):
            return "[a&&b]"
        case ast.Alternation(items):
            check()
            return f"(?:{'|'.join(map(_regex, items))})"
        case ast.Repeat(item, minimum, maximum):
            return f"(?:{_regex(item)}){quantifier(minimum, maximum)}"
        case _:
            raise AssertionError(node)


@lru_cache(maxsize=1024)
def _set(ranges: tuple[ast.Range, ...]) -> str:
    parts = []
    for low, high in without_surrogates(ranges):
        parts.append(_char(low) if low == high else f"{_char(low)}-{_char(high)}")
    return f"[{''.join(parts)}]" if parts else "[a&&b]"


def _char(code: int) -> str:
    char = chr(code)
    return char if char.isascii() and char.isalnum() else f"\\x{{{code:X}}}"
