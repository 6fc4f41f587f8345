"""Nodes with rules as the text of a context-free grammar, in llguidance's dialect of Lark.

What is regular becomes terminals: llguidance runs them as automata and parses only between them. Of the terminals that
can stand in one place it takes the longest match and never goes back.
"""

from __future__ import annotations

from graftlm.core.errors import GrammarError
from graftlm.core.grammar import ast
from graftlm.core.grammar.ast import Node
from graftlm.core.grammar.automata import product

MAX_SERIES = 400  # llguidance follows each item inside the one before, and its stack ends somewhere
SURROGATES = ((0xD800, 0xDFFF),)


def to_lark(node: Node, rules: dict[str, Node]) -> str:
    """The grammar that starts with `node`. Raises GrammarError for what terminals and rules cannot say."""
    return _Writer(rules).write(node)


class _Writer:
    def __init__(self, rules: dict[str, Node]) -> None:
        self._rules = rules
        self._names = {name: f"r{i}" for i, name in enumerate(rules)}
        self._terminals: dict[Node, str] = {}
        self._num_states = 0
        self._lines: list[str] = []
        self._regular: dict[int, tuple[Node, bool]] = {}  # by id, with the node so that the id stays its own

    def write(self, node: Node) -> str:
        start = self._rule(node)
        bodies = [f"{self._names[name]}: {self._rule(body)}" for name, body in self._rules.items()]
        return "\n".join([f"start: {start}", *bodies, *self._lines]) + "\n"

    def _rule(self, node: Node) -> str:
        """`node` as an expression of rules and terminals."""
        if self._is_regular(node):
            return self._terminal_use(node)
        match node:
            case ast.Rule(name):
                if name not in self._names:
                    known = ", ".join(self._names) or "none"
                    raise GrammarError(f"rule {name!r} is named but not given; given: {known}")
                return self._names[name]
            case ast.Concat(items):
                return self._concat(self._runs(items))
            case ast.Alternation(items):
                regular = [item for item in items if self._is_regular(item)]
                others = [item for item in items if not self._is_regular(item)]
                merged = [ast.alternation(*regular)] if regular else []
                return " | ".join(f"({self._rule(item)})" for item in [*merged, *others])
            case ast.Repeat(item, minimum, maximum):
                return self._repeat(f"({self._rule(item)})", minimum, maximum)
            case ast.Series():
                return self._series(node)
            case ast.Automaton():
                return self._automaton(node)
            case ast.Intersection() | ast.Difference():
                return self._automaton(product.product(node))
            case _:
                raise AssertionError(node)

    def _concat(self, runs: list[Node]) -> str:
        """A terminal takes all it can, so one that something optional follows is also written joined to it."""
        for i, (run, after) in enumerate(zip(runs, runs[1:], strict=False)):
            if self._is_regular(run) and isinstance(after, (ast.Alternation, ast.Repeat)) and not _loops(after):
                ways = after.items if isinstance(after, ast.Alternation) else (ast.EMPTY, after.item)
                return " | ".join(f"({self._rule(ast.concat(*runs[:i], run, way, *runs[i + 2 :]))})" for way in ways)
        return " ".join(f"({self._rule(run)})" for run in runs)

    def _runs(self, items: tuple[Node, ...]) -> list[Node]:
        """Join neighbours that are regular."""
        runs: list[Node] = []
        for item in items:
            if runs and self._is_regular(item) and self._is_regular(runs[-1]):
                runs[-1] = ast.concat(runs[-1], item)
            else:
                runs.append(item)
        return runs

    def _repeat(self, inside: str, minimum: int, maximum: int | None) -> str:
        if (minimum, maximum) == (0, 1):
            return f"{inside}?"
        if maximum is None and minimum <= 1:
            return f"{inside}{'+' if minimum else '*'}"
        return f"{inside}{{{minimum},{'' if maximum is None else maximum}}}"

    def _series(self, node: ast.Series) -> str:
        """Right-linear rules, two for each place: with nothing written before it, and with something."""
        if len(node.items) > MAX_SERIES:
            raise GrammarError(
                f"{len(node.items)} members that may be left out, the limit of a context-free grammar is {MAX_SERIES}; "
                "require some of them or nest them"
            )
        separator = self._rule(node.separator)
        last = len(node.items) - 1
        first_names = [self._fresh() for _ in node.items]
        later_names = [self._fresh() for _ in node.items]
        for i, (item, endless) in enumerate(node.items):
            value = self._rule(item)
            many = f"({value}) (({separator}) ({value}))*" if endless else f"({value})"
            rest = f" {later_names[i + 1]}" if i < last else ""
            skip_first = [first_names[i + 1]] if i < last else []
            skip_later = [later_names[i + 1]] if i < last else ['""']
            if i == last and not node.nonempty:
                skip_first = ['""']
            self._lines.append(f"{first_names[i]}: {' | '.join([f'{many}{rest}', *skip_first])}")
            self._lines.append(f"{later_names[i]}: {' | '.join([f'({separator}) {many}{rest}', *skip_later])}")
        return first_names[0]

    def _automaton(self, node: ast.Automaton) -> str:
        """One rule for each state; only for ASCII, since a terminal is whole characters."""
        names = [self._fresh() for _ in node.rows]
        for state, row in enumerate(node.rows):
            ways = []
            for low, high, target in row:
                if high > 0x7F:
                    raise GrammarError(
                        "a combination of patterns beyond ASCII inside a schema that contains itself cannot be kept; "
                        "use one pattern instead of several"
                    )
                ways.append(f"/{_set(((low, high),))}/ {names[target]}")
            ways += ['""'] if state in node.accepting else []
            self._lines.append(f"{names[state]}: {' | '.join(ways)}")
        return names[0]

    def _fresh(self) -> str:
        self._num_states += 1
        return f"s{self._num_states}"

    def _terminal_use(self, node: Node) -> str:
        if isinstance(node, ast.Empty):
            return '""'
        name = self._terminal(node)
        if not ast.nullable(node):
            return name
        # a terminal must not match the empty text: the rule leaves it out instead
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
            case _ if _is_plain(node):
                return f"/{_regex(node)}/"
            case ast.Intersection(items):
                return " & ".join(self._terminal(item) for item in items)
            case ast.Difference(item, minus):
                return f"{self._terminal(item)} & ~{self._terminal(minus)}"
            case ast.Concat(items):
                return " ".join(self._terminal(item) for item in items)
            case ast.Alternation(items):
                return " | ".join(self._terminal(item) for item in items)
            case ast.Repeat(item, minimum, maximum):
                return self._repeat(self._terminal(item), minimum, maximum)
            case _:
                raise AssertionError(node)

    def _is_regular(self, node: Node) -> bool:
        """Whether a terminal can hold `node`; an automaton takes rules, as regexes have no states."""
        key = id(node)
        if key not in self._regular:
            match node:
                case ast.Rule() | ast.Automaton():
                    found = False
                case ast.Concat(items) | ast.Alternation(items) | ast.Intersection(items):
                    found = all(map(self._is_regular, items))
                case ast.Repeat(item, _, _):
                    found = self._is_regular(item)
                case ast.Difference(item, minus):
                    found = self._is_regular(item) and self._is_regular(minus)
                case ast.Series():
                    found = False
                case _:
                    found = True
            self._regular[key] = (node, found)
        return self._regular[key][1]


def _loops(node: ast.Alternation | ast.Repeat) -> bool:
    return isinstance(node, ast.Repeat) and (node.min, node.max) != (0, 1)


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
            return "".join(_char(ord(char)) for char in _decoded(data))
        case ast.CharSet(ranges):
            return _set(ranges)
        case ast.Concat(items):
            return "".join(map(_regex, items))
        case ast.Alternation(()):
            return "[a&&b]"
        case ast.Alternation(items):
            return f"(?:{'|'.join(map(_regex, items))})"
        case ast.Repeat(item, minimum, maximum):
            count = {(0, 1): "?", (0, None): "*", (1, None): "+"}.get((minimum, maximum))
            return f"(?:{_regex(item)}){count or f'{{{minimum},{maximum if maximum is not None else str()}}}'}"
        case _:
            raise AssertionError(node)


def _decoded(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise GrammarError(
            f"{data!r} is not UTF-8, which a context-free grammar needs; use whole characters"
        ) from error


def _set(ranges: tuple[ast.Range, ...]) -> str:
    parts = []
    for low, high in ast.intersect(ranges, ast.complement(SURROGATES)):
        parts.append(_char(low) if low == high else f"{_char(low)}-{_char(high)}")
    return f"[{''.join(parts)}]" if parts else "[a&&b]"


def _char(code: int) -> str:
    char = chr(code)
    return char if char.isascii() and char.isalnum() else f"\\x{{{code:X}}}"
