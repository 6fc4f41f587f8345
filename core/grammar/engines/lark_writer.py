"""Write a language as a Lark grammar in llguidance's dialect.

Serves the constraints that no automaton holds, about one public schema in thirty. Regular parts become terminals and
the rest rules. Where several terminals may come next, llguidance's lexer takes the longest match and never backtracks:
JSON is cut into its tokens, each a terminal. Were `{"a":` one of them, the lexer would never see the `{` of `{"b":`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.automata.products.product import product
from graftlm.core.grammar.budget import check
from graftlm.core.grammar.nodes import nodes
from graftlm.core.grammar.nodes.nodes import Node

MAX_STATES = 1_000
"""States of a graph or an automaton, and depth of all rules: llguidance nests each in the one before on its stack."""
MAX_TERMINALS = 45_000
"""Terminals of a grammar: llguidance compares each with all others, about 4 s for this number."""
MAX_SYMBOLS = 65_525
"""Symbols of a grammar, the limit of llguidance's parser."""
TOO_MANY_SYMBOLS = (
    f"the constraint takes more than {MAX_SYMBOLS:,} symbols, the limit of llguidance's parser, and a property "
    "takes up to four; nest properties in objects, or describe them by patternProperties"
)
MAX_SHORTEST = 1 << 17
"""Bytes of the shortest string of any part: llguidance emits a forced string in one step, about 1 s for this size."""
_NO_END = 1 << 62
_RULE_NAMES, _QUOTED = re.compile(r"\b[rs]\d+\b"), re.compile(r'"(?:[^"\\]|\\.)*"')
_MARKS = b"{}[],:"
_SPACES, _WHOLE, _PARTS, _RULES = map(chr, range(0x10000, 0x50000, 0x10000))
"""Items of a sequence beside its literals: blanks, one token or less, other regular nodes, nodes with rules."""
_BLANK = f"[ \t\n\r{_SPACES}-{chr(ord(_WHOLE) - 1)}]*+"
_STRING = rf'"(?:[^"\\{_RULES}-\U0004ffff]|\\.)*+"'
_PIECE = rf"(?:{_STRING}|[^ \t\n\r{{}}\[\],:\"{_SPACES}-{chr(ord(_WHOLE) - 1)}{_PARTS}-\U0004ffff])"
_TOKEN = re.compile(
    rf"{_BLANK}[{{}}\[\],:]{_BLANK}"
    rf"|{_PIECE}(?:{_BLANK}{_PIECE})*+(?:{_BLANK}:{_BLANK}|{_BLANK}(?![{{}}\[\],])|)"
    rf"|[{_PARTS}-\U0004ffff]|[ \t\n\r{_SPACES}-{chr(ord(_WHOLE) - 1)}]",
    re.DOTALL,
)
"""A mark with its blanks, a name and its colon or another piece, an item of several tokens, a lone blank."""


def to_lark(node: Node, rules: Mapping[str, Node]) -> str:
    """Return the grammar whose rule `start` derives `node`.

    Raises GrammarError for a part that neither terminals nor rules express, or that exceeds the limits above.
    """
    _Shortest(rules).check(node)
    return _LarkWriter(rules).write(node)


class _LarkWriter:
    def __init__(self, rules: Mapping[str, Node]) -> None:
        self._rules = rules
        self._words: dict[str, str] = {}  # of rules, by name
        self._work: list[str] = []  # rules that are named and not yet written
        self._terminals: dict[Node, str] = {}
        self._graphs: dict[int, tuple[Node, str]] = {}  # by id, with the node so that the id stays its own
        self._regular: dict[int, tuple[Node, bool]] = {}
        self._is_one: dict[int, tuple[Node, bool]] = {}
        self._lines: list[str] = []
        self._num_states = 0

    def write(self, node: Node) -> str:
        start = self._choice(node)
        while self._work:
            name = self._work.pop()
            self._add(self._words[name], self._choice(self._rules[name]))
        lines = [f"start: {start}", *self._lines]
        depth = _depth(lines)
        if depth > MAX_STATES:
            raise GrammarError(
                f"the definitions of the constraint nest {depth:,} rules deep, the limit of a context-free grammar is "
                f"{MAX_STATES:,}; nest fewer definitions, or objects with fewer optional properties"
            )
        return "\n".join(lines) + "\n"

    def _add(self, name: str, body: str) -> None:
        self._lines.append(f"{name}: {body}")
        if len(self._lines) % 16 == 0:
            check()
        if len(self._lines) > MAX_SYMBOLS:
            raise GrammarError(TOO_MANY_SYMBOLS)

    def _choice(self, node: Node) -> str:
        """Return `node` as the body of a rule."""
        if type(node) is nodes.Rule:
            return self._word(node.name)
        if self._is_token(node):
            return self._terminal(node)
        match node:
            case nodes.Literal():
                return self._sequence((node,))
            case nodes.Concat(items):
                return self._sequence(items)
            case nodes.Alternation(items):
                regular = [item for item in items if self._is_token(item)]
                ways = [nodes.alternation(*regular)] if regular else []
                return " | ".join(map(self._choice, [*ways, *(item for item in items if item not in regular)]))
            case nodes.Repeat(item, low, high):
                return f"({self._choice(item)}){_quantifier(low, high)}"
            case nodes.Graph() | nodes.Automaton():
                return self._states(node)
            case _:
                assert isinstance(node, nodes.Intersection | nodes.Difference)
                return self._choice(product(node))

    def _sequence(self, items: Sequence[Node]) -> str:
        tokens = self._json_tokens(items)
        if tokens:
            return " ".join(map(self._atom, tokens))
        runs = list[Node]()  # neighbours that are tokens are one terminal
        for item in items:
            if runs and self._is_token(item) and self._is_token(runs[-1]):
                runs[-1] = nodes.concat(runs[-1], item)
            else:
                runs.append(item)
        for i, (run, after) in enumerate(zip(runs, runs[1:], strict=False)):
            # a terminal takes all it can: it is also written joined with an option that follows it
            ways: tuple[Node, ...] = ()
            if isinstance(after, nodes.Alternation):
                ways = after.items
            elif isinstance(after, nodes.Repeat) and (after.min, after.max) == (0, 1):
                ways = (nodes.EMPTY, after.item)
            if ways and self._is_token(run):
                return " | ".join([self._choice(nodes.concat(*runs[:i], run, way, *runs[i + 2 :])) for way in ways])
        return " ".join(map(self._atom, runs))

    def _atom(self, node: Node) -> str:
        """Return `node` beside others."""
        text = self._choice(node)
        return text if text.isalnum() or type(node) is nodes.Literal else f"({text})"

    def _word(self, name: str) -> str:
        word = self._words.get(name)
        if word is None:
            if name not in self._rules:
                known = ", ".join(self._rules) or "none"
                raise GrammarError(
                    f"there is no rule {name!r}; give it along with the node that names it (given: {known})"
                )
            body = self._rules[name]
            if self._is_token(body):
                word = self._terminal(body)
            else:
                word = f"r{len(self._words)}"
                self._work.append(name)
            self._words[name] = word
        return word

    def _states(self, node: nodes.Graph | nodes.Automaton) -> str:
        """Return the rule of state 0. Each state has a rule, which names the rules of the states after it."""
        if id(node) not in self._graphs:
            graph = _as_graph(node)
            if graph is None:
                raise GrammarError(
                    "a combination of patterns beyond ASCII inside a constraint that contains itself cannot be kept; "
                    "use one pattern instead of several"
                )
            rows = graph.rows
            if len(rows) > MAX_STATES:
                raise GrammarError(
                    f"an object with optional properties or a combination of patterns takes {len(rows):,} states, the "
                    f"limit of a context-free grammar is {MAX_STATES:,}; require properties, nest them in objects, or "
                    "combine fewer patterns"
                )
            first, self._num_states = self._num_states, self._num_states + len(rows)
            self._graphs[id(node)] = node, f"s{first}"
            for state, row in enumerate(rows, first):
                ways = [
                    f"s{first + to}" if item == nodes.EMPTY else f"{self._atom(item)} s{first + to}" for item, to in row
                ]
                self._add(f"s{state}", " | ".join([*ways, '""'] if state - first in graph.accepting else ways))
        return self._graphs[id(node)][1]

    def _terminal(self, node: Node) -> str:
        """Return the terminal of a regular node, optional if it matches the empty string, which no terminal may."""
        if isinstance(node, nodes.Empty):
            return '""'
        node = self._without_states(node)
        word = self._terminals.get(node)
        if word is None:
            if len(self._terminals) >= MAX_TERMINALS:
                raise GrammarError(
                    f"the constraint has more than {MAX_TERMINALS:,} different names and values between brackets and "
                    "commas; split it, or describe them by a pattern or by bounds"
                )
            if isinstance(node, nodes.Literal):
                word = self._terminals[node] = json.dumps(_decoded(node.data))
                return word
            word = self._terminals[node] = f"T{len(self._terminals)}"
            some = " & /(?s:.+)/" if nodes.nullable(node) else ""
            self._add(word, f"({self._expression(node)}){some}" if some else self._expression(node))
        return f"({word})?" if nodes.nullable(node) else word

    def _expression(self, node: Node) -> str:
        """Return a regular node as the definition of a terminal: a regex, or regexes joined by `&` and `~`."""
        if not _has_products(node):
            return f"/{_regex(node) or '(?:)'}/"  # two slashes begin a comment
        match node:
            case nodes.Intersection(items):
                return " & ".join([f"({self._expression(item)})" for item in items])
            case nodes.Difference(item, minus):
                return f"({self._expression(item)}) & ~({self._expression(minus)})"
            case nodes.Concat(items):
                return " ".join([f"({self._expression(item)})" for item in items])
            case nodes.Alternation(items):
                return " | ".join([f"({self._expression(item)})" for item in items])
            case nodes.Repeat(item, low, high):
                return f"({self._expression(item)}){_quantifier(low, high)}"
        raise AssertionError(node)

    def _is_token(self, node: Node) -> bool:
        """Return True if `node` is regular and at most one token of JSON."""
        if isinstance(node, nodes.Rule):
            return False
        found = self._is_one.get(id(node))
        if found is None:
            match node:
                case nodes.Literal() | nodes.Concat():
                    cut = self._cut(node.items if isinstance(node, nodes.Concat) else (node,))
                    is_one = cut is None or len(cut) < 2 and not any(token[0] >= _PARTS for token in cut)
                case nodes.Alternation() | nodes.Repeat():
                    is_one = all(map(self._is_token, nodes.children(node)))
                case _:
                    is_one = True
            found = self._is_one[id(node)] = node, is_one and self._is_regular(node)
        return found[1]

    def _json_tokens(self, items: Sequence[Node]) -> list[Node]:
        """Cut `items`, one after the other, at the brackets, commas and colons outside of JSON strings.

        Blanks beside a mark belong to it. [] where there is no mark, or a string that does not end.
        """
        found = []
        for token in self._cut(items) or ():
            parts = (
                items[ord(part) & 0xFFFF] if part >= _SPACES else nodes.Literal(part.encode("latin-1"))
                for part in token
            )
            found.append(nodes.concat(*parts))
        return found if any(map(_has_marks, found)) and len(found) > 1 else []

    def _cut(self, items: Sequence[Node]) -> list[str] | None:
        """Return the tokens of `items`: a character for each byte of a literal, and for any other item one that tells
        its kind and its index; None where a string does not end.
        """
        if len(items) > 0xFFFF:
            return None
        pairs = enumerate(items)
        text = "".join(
            [x.data.decode("latin-1") if isinstance(x, nodes.Literal) else self._kind(x, i) for i, x in pairs]
        )
        found = [match[0] for match in _TOKEN.finditer(text)]
        return found if sum(map(len, found)) == len(text) else None

    def _kind(self, item: Node, index: int) -> str:
        is_blank = isinstance(item, nodes.Repeat) and isinstance(item.item, nodes.CharSet) and _are_blanks(item.item)
        kind = _SPACES if is_blank else _WHOLE if self._is_token(item) else _PARTS if self._is_regular(item) else _RULES
        return chr(ord(kind) + index)

    def _is_regular(self, node: Node) -> bool:
        """Return True if a terminal can hold `node`; an automaton only by its source, and no graph."""
        if isinstance(node, nodes.Rule | nodes.Graph):
            return False
        found = self._regular.get(id(node))
        if found is None:
            if isinstance(node, nodes.Automaton):
                regular = node.source is not None and self._is_regular(node.source)
            else:
                regular = all(map(self._is_regular, nodes.children(node)))
            found = self._regular[id(node)] = node, regular
        return found[1]

    def _without_states(self, node: Node) -> Node:
        """Return a regular node with the sources of its automata in their place."""
        found = node.source if isinstance(node, nodes.Automaton) else None
        return nodes.map_children(self._without_states, node if found is None else found)


def _depth(lines: Sequence[str]) -> int:
    """Return how deep a parser of the grammar nests that visits each rule where it is first named."""
    named: dict[str, list[str]] = {}
    for line in lines:
        name, _, body = line.partition(": ")
        named[name] = _RULE_NAMES.findall(_QUOTED.sub("", body)) if name[0] != "T" else []
    seen, path, depth = {"start"}, [iter(named["start"])], 1
    while path:
        below = next((name for name in path[-1] if name not in seen), None)
        if below is None:
            path.pop()
        else:
            seen.add(below)
            path.append(iter(named[below]))
            depth = max(depth, len(path))
    return depth


def _has_marks(node: Node) -> bool:
    if isinstance(node, nodes.Literal):
        return any(byte in _MARKS for byte in node.data)
    return any(map(_has_marks, nodes.children(node)))


def _are_blanks(node: nodes.CharSet) -> bool:
    return all(chr(code) in " \t\n\r" for low, high in node.ranges for code in range(low, min(high, low + 4) + 1))


def _has_products(node: Node) -> bool:
    return isinstance(node, nodes.Intersection | nodes.Difference) or any(map(_has_products, nodes.children(node)))


def _regex(node: Node) -> str:
    match node:
        case nodes.Literal(data):
            return "".join([char if char in _PLAIN else _escaped(ord(char)) for char in _decoded(data)])
        case nodes.Empty():
            return ""
        case nodes.CharSet(ranges):
            # UTF-8 has no surrogates
            kept = nodes.intersect(ranges, nodes.complement(((0xD800, 0xDFFF),)))
            return f"[{''.join([f'{_escaped(low)}-{_escaped(high)}' for low, high in kept])}]" if kept else _NOTHING
        case nodes.Concat(items):
            return "".join(map(_regex, items))
        case nodes.Alternation(items):
            check()
            return f"(?:{'|'.join(map(_regex, items))})" if items else _NOTHING
        case nodes.Repeat(item, low, high):
            return f"(?:{_regex(item)}){_quantifier(low, high)}"
    raise AssertionError(node)


_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_ \"',:;=!%@-")
_NOTHING = "[a&&b]"


def _escaped(code: int) -> str:
    return f"\\x{{{code:X}}}"


def _decoded(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise GrammarError(
            f"{data!r} is not UTF-8, which a context-free grammar needs; use whole characters"
        ) from error


def _quantifier(low: int, high: int | None) -> str:
    short = {(0, 1): "?", (0, None): "*", (1, None): "+"}.get((low, high))
    return short or f"{{{low},{'' if high is None else high}}}"


def _as_graph(node: nodes.Graph | nodes.Automaton) -> nodes.Graph | None:
    """Return `node` with characters as edges; None for an automaton that reads bytes beyond ASCII."""
    if isinstance(node, nodes.Graph):
        return node
    if node.num_edges and node.edges[:, 3].max() > 0x7F:
        return None
    rows = [tuple((nodes.CharSet(((low, high),)), target) for low, high, target in row) for row in node.rows]
    return nodes.Graph(tuple(rows), frozenset(node.ends.tolist()))


class _Shortest:
    """The shortest strings of nodes and rules, in bytes."""

    def __init__(self, rules: Mapping[str, Node]) -> None:
        self._rules = rules
        self._of_rule = dict.fromkeys(rules, _NO_END)
        self._known: dict[int, int] = {}  # by id, in this round

    def check(self, node: Node) -> None:
        """Raise GrammarError if the shortest string of a part of `node` or of a rule has over MAX_SHORTEST bytes."""
        changed = True
        while changed:
            changed = False
            self._known.clear()
            for name, body in self._rules.items():
                length = self._of(body)
                if length < self._of_rule[name]:
                    self._of_rule[name], changed = length, True
            check()
        finite = [length for length in (self._of(node), *self._known.values()) if length < _NO_END]
        if finite and max(finite) > MAX_SHORTEST:
            raise GrammarError(
                f"the shortest string of a part of the constraint has {max(finite):,} bytes, the limit of a "
                f"context-free grammar is {MAX_SHORTEST:,}; lower minItems, or let fewer definitions name others "
                "several times"
            )

    def _of(self, node: Node) -> int:
        if isinstance(node, nodes.Literal):
            return len(node.data)
        if isinstance(node, nodes.Rule):
            return self._of_rule.get(node.name, 0)
        found = self._known.get(id(node))
        if found is None:
            found = self._known[id(node)] = min(self._composed(node), _NO_END)
        return found

    def _composed(self, node: Node) -> int:
        match node:
            case nodes.Concat(items):
                return sum(map(self._of, items))
            case nodes.Alternation(items):
                return min(map(self._of, items), default=_NO_END)
            case nodes.Repeat(item, low, _):
                return low * self._of(item)
            case nodes.Graph(rows, accepting):
                return _shortest_walk([[(self._of(item), to) for item, to in row] for row in rows], accepting)
            case nodes.Automaton(ends=ends):
                return _shortest_walk([[(1, to) for _, _, to in row] for row in node.rows], frozenset(ends.tolist()))
            case nodes.Intersection(items):
                return max(map(self._of, items))
            case nodes.Difference(item):
                return self._of(item)
            case nodes.CharSet():
                return 1
        return 0


def _shortest_walk(rows: Sequence[Sequence[tuple[int, int]]], accepting: frozenset[int]) -> int:
    """Return the length of the shortest walk from state 0 to an accepting state; `rows` has (length, target)."""
    queue, done = [(0, 0)], set[int]()
    while queue:
        length, state = heappop(queue)
        if state in accepting or length >= _NO_END:
            return length
        if state not in done:
            done.add(state)
            for more, target in rows[state]:
                heappush(queue, (length + more, target))
    return _NO_END
