"""Nodes with rules as the text of a context-free grammar, in llguidance's dialect of Lark.

What is regular becomes terminals: llguidance runs them as automata and parses only between them. Where several
terminals can stand, its lexer takes the longest match and never backtracks.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache

from graftlm.core.errors import GrammarError
from graftlm.core.grammar import ast
from graftlm.core.grammar.ast import Node
from graftlm.core.grammar.automata.product import product
from graftlm.core.grammar.budget import check
from graftlm.core.grammar.engines.rules import RuleWriter, decoded, quantifier, without_surrogates

MAX_STATES = 1_000  # each state of a walk nests inside the one before it, and llguidance's parser stack is limited


def to_lark(node: Node, rules: dict[str, Node]) -> str:
    """The grammar that starts with `node`. Raises GrammarError for what terminals and rules cannot express."""
    return _LarkWriter(rules).write(node)


_ATOM, _SEQUENCE, _CHOICE = range(3)
"""How tightly a text holds together: a choice needs parentheses in a sequence, both need them before a quantifier."""

_Text = tuple[str, int]


class _LarkWriter(RuleWriter):
    """Writes as few words as it can: llguidance takes about as long for each, be it a name, a mark or a literal."""

    START = "start"
    DEFINES = ":"

    def __init__(self, rules: dict[str, Node]) -> None:
        super().__init__(rules)
        self._terminals: dict[Node, str] = {}
        self._uses: dict[int | bytes, tuple[Node, str, str]] = {}  # by id or data; text, and the rule of later uses
        self._regular: dict[int, tuple[Node, bool]] = {}  # by id, with the node so that the id stays its own
        self._optional: set[Node] = set()

    def _body(self, node: Node) -> str:
        return self._text(node)[0]

    def _text(self, node: Node) -> _Text:
        """`node` as an expression of rules and terminals."""
        if isinstance(node, ast.Rule):
            body = self._rules.get(node.name)
            if body is not None and self._is_regular(body):
                return _of_use(self._terminal_use(body))
            return self._named(node.name), _ATOM
        if self._is_regular(node):
            return _of_use(self._terminal_use(node))
        if isinstance(node, ast.Concat):
            return self._concat(self._runs(node.items))
        if isinstance(node, ast.Repeat):
            return f"{_grouped(self._text(node.item), _ATOM)}{quantifier(node.min, node.max)}", _SEQUENCE
        if isinstance(node, ast.Alternation):
            regular = [item for item in node.items if self._is_regular(item)]
            others = [item for item in node.items if not self._is_regular(item)]
            merged = [ast.alternation(*regular)] if regular else []
            return " | ".join([self._body(item) for item in [*merged, *others]]), _CHOICE
        if isinstance(node, ast.Graph):
            _check_length(node)
            return self._graph(node), _ATOM
        if isinstance(node, ast.Automaton):
            return self._short_automaton(node), _ATOM
        assert isinstance(node, ast.Intersection | ast.Difference)
        return self._short_automaton(product(node)), _ATOM

    def _concat(self, runs: list[Node]) -> _Text:
        """A terminal takes all it can, so one that something optional follows is also written joined to it."""
        for i, (run, after) in enumerate(zip(runs, runs[1:], strict=False)):
            if isinstance(after, (ast.Alternation, ast.Repeat)) and self._is_regular(run) and not _loops(after):
                ways = after.items if isinstance(after, ast.Alternation) else (ast.EMPTY, after.item)
                found = [self._body(ast.concat(*runs[:i], run, way, *runs[i + 2 :])) for way in ways]
                return " | ".join(found), _CHOICE
        return " ".join([self._in_sequence(run) for run in runs]), _SEQUENCE

    def _in_sequence(self, node: Node) -> str:
        return _grouped(self._text(node), _SEQUENCE)

    def _graph(self, node: ast.Graph) -> str:
        """A rule for each state, which says how the walk goes on, but for those that are written where they are met."""
        walk = _Walk(node, self)
        for state in range(len(node.rows)):
            if walk.has_rule(state):
                self._define(walk.names[state], *walk.ways(state))
        return walk.names[0]

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
        """A terminal in a rule. What is used again has a rule, as each terminal in a rule is a symbol of its own."""
        if isinstance(node, ast.Empty):
            return '""'
        key = node.data if isinstance(node, ast.Literal) else id(node)
        known = self._uses.get(key)
        if known is None:
            text = self._new_use(node)
            self._uses[key] = (node, text, "")
            return text
        _, text, name = known
        if not name:
            name = self._fresh()
            self._define(name, text)
            self._uses[key] = (node, text, name)
        return name

    def _new_use(self, node: Node) -> str:
        if isinstance(node, ast.Literal):
            return _string(node.data)
        name = self._terminal(node)
        if not ast.nullable(node):
            return name
        # a terminal must not match the empty text: the rule makes it optional instead
        some = f"{name}_SOME"
        if node not in self._optional:
            self._optional.add(node)
            self._lines.append(f"{some}: {name} & /(?s:.+)/")
        return f"{some}?"

    def _terminal(self, node: Node) -> str:
        if node not in self._terminals:
            name = f"T{len(self._terminals)}"
            self._terminals[node] = name
            self._lines.append(f"{name}: {self._expression(node)[0]}")
        return self._terminals[node]

    def _in_terminal(self, node: Node, level: int) -> str:
        """`node` in the definition of a terminal: most are in one only, some stand for themselves."""
        if isinstance(node, ast.Literal):
            return _string(node.data)
        if isinstance(node, ast.Repeat) or node in self._terminals:
            return self._terminal(node)
        return _grouped(self._expression(node), level)

    def _expression(self, node: Node) -> _Text:
        """`node` as the definition of a terminal: a regex, but for intersections and differences."""
        match node:
            case _ if (regex := _plain(node)) is not None:
                return regex, _ATOM
            case ast.Intersection(items):
                return " & ".join([self._in_terminal(item, _ATOM) for item in items]), _CHOICE
            case ast.Difference(item, minus):
                return f"{self._in_terminal(item, _ATOM)} & ~{self._in_terminal(minus, _ATOM)}", _CHOICE
            case ast.Concat(items):
                return " ".join([self._in_terminal(item, _SEQUENCE) for item in items]), _SEQUENCE
            case ast.Alternation(items):
                return " | ".join([self._in_terminal(item, _SEQUENCE) for item in items]), _CHOICE
            case ast.Repeat(item, minimum, maximum):
                return f"{self._in_terminal(item, _ATOM)}{quantifier(minimum, maximum)}", _SEQUENCE
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


class _Walk:
    """The rules of a Graph. A state with one way on has none where that way is short, or met once: it is written there.

    names  of the states; "" for one where the walk ends and nothing may follow
    """

    def __init__(self, graph: ast.Graph, writer: _LarkWriter) -> None:
        self._graph = graph
        self._writer = writer
        arrivals = [0] * len(graph.rows)
        for row in graph.rows:
            for _, target in row:
                arrivals[target] += 1
        self._items: dict[tuple[int, int], str] = {}  # by state and edge: an item is written once, with its rules
        self._inlined: dict[int, str] = {}
        for state, row in enumerate(graph.rows):
            if state and len(row) == 1 and row[0][1] != state and state not in graph.accepting and arrivals[state] <= 2:
                text = self._item(state, 0)
                if arrivals[state] == 1 or text.count(" ") < _SHORT:
                    self._inlined[state] = text
        for state in list(self._inlined):  # one that leads to another such place leaves that one its rule
            if state in self._inlined:
                self._inlined.pop(graph.rows[state][0][1], None)
        self.names = [
            "" if state and not row and state in graph.accepting else "?" if state in self._inlined else writer._fresh()
            for state, row in enumerate(graph.rows)
        ]

    def has_rule(self, state: int) -> bool:
        return bool(self.names[state]) and state not in self._inlined

    def _item(self, state: int, edge: int) -> str:
        if (state, edge) not in self._items:
            item = self._graph.rows[state][edge][0]
            self._items[state, edge] = "" if item == ast.EMPTY else self._writer._in_sequence(item)
        return self._items[state, edge]

    def ways(self, state: int) -> list[str]:
        found = []
        for edge, (_, target) in enumerate(self._graph.rows[state]):
            words = [self._item(state, edge)]
            if target in self._inlined:
                words.append(self._inlined[target])
                target = self._graph.rows[target][0][1]
            found.append(" ".join([word for word in (*words, self.names[target]) if word]) or '""')
        return [*found, *(['""'] if state in self._graph.accepting else [])]


_SHORT = 2
"""Blanks in what is rather written twice than named."""


def _of_use(use: str) -> _Text:
    return use, _SEQUENCE if use[-1] == "?" else _ATOM


def _grouped(text: _Text, level: int) -> str:
    """`text` where nothing looser than `level` may stand."""
    return text[0] if text[1] <= level else f"({text[0]})"


def _string(data: bytes) -> str:
    return json.dumps(decoded(data))


def _check_length(node: ast.Graph) -> None:
    if len(node.rows) > MAX_STATES:
        raise GrammarError(
            f"an object or array of {len(node.rows):,} places, the limit of a context-free grammar is {MAX_STATES:,}; "
            "require some of its members or nest them"
        )


def _loops(node: ast.Alternation | ast.Repeat) -> bool:
    return isinstance(node, ast.Repeat) and (node.min, node.max) != (0, 1)


_SPECIAL = re.compile("[^0-9A-Za-z_ \"',:;=!%@-]")


@lru_cache(maxsize=4096)
def _plain(node: Node) -> str | None:
    """`node` as one regex; None where it takes several terminals."""
    return f"/{_regex(node) or '(?:)'}/" if _is_plain(node) else None  # two slashes begin a comment


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
