"""Nodes with rules as the text of a context-free grammar, in llguidance's dialect of Lark.

What is regular becomes terminals: llguidance runs them as automata and parses only between them. Where several
terminals can stand, its lexer takes the longest match and never backtracks.
"""

from __future__ import annotations

from graftlm.core.errors import GrammarError
from graftlm.core.grammar import ast
from graftlm.core.grammar.ast import Node
from graftlm.core.grammar.automata.products.product import minimal, product
from graftlm.core.grammar.engines.lark.optional_row import is_optional_row, write_row
from graftlm.core.grammar.engines.lark.overlaps import as_one
from graftlm.core.grammar.engines.lark.segments import Segments, depth
from graftlm.core.grammar.engines.lark.short_regex import short_regex
from graftlm.core.grammar.engines.lark.walk import Walk
from graftlm.core.grammar.engines.lark.words import CLOSING, ITSELF, OPENING, is_rule, is_short, joined, string
from graftlm.core.grammar.engines.regex_text import char_class, plain
from graftlm.core.grammar.engines.rules import RuleWriter, quantifier

MAX_STATES = 1_000
"""States of an automaton whose rules nest one inside the other, each as deep as llguidance recurses."""
MAX_DEPTH = 400
"""The same of a walk over members or items: a longer one is cut in parts, whose rules nest less deep."""

MAX_TERMINALS = 45_000
"""Names and values that differ: llguidance compares each with all others, which takes about 4 s for so many."""
_MAX_WRITTEN = 3
"""Uses of a terminal that are written out: a rule takes about as long as four of them."""
MAX_SYMBOLS = 65_525
TOO_MANY_SYMBOLS = (
    f"the constraint takes more than {MAX_SYMBOLS:,} symbols, the limit of llguidance's parser, and a property "
    "takes up to four; nest properties in objects, or describe them by patternProperties"
)


def to_lark(node: Node, rules: dict[str, Node]) -> str:
    """The grammar that starts with `node`. Raises GrammarError for what terminals and rules cannot express.

    So does one of more terminals or rules than llguidance would take, after many seconds.
    """
    return _LarkWriter(rules).write(node)


_ATOM, _SEQUENCE, _CHOICE = range(3)
"""How tightly a text holds together: a choice needs parentheses in a sequence, both need them before a quantifier."""

_Text = tuple[str, int]
_Use = tuple[Node, str, int]
"""A terminal, kept so that its id stays its own; how it is written; how often it was met, up to four times."""


class _LarkWriter(RuleWriter):
    """Writes as few words as it can: llguidance takes about as long for each, be it a name, a mark or a literal."""

    START = "start"
    DEFINES = ":"

    def __init__(self, rules: dict[str, Node]) -> None:
        super().__init__(rules)
        self._terminals: dict[Node, str] = {}
        self._uses: dict[int | bytes, _Use] = {}  # of terminals, by id or data
        self._regular: dict[int, tuple[Node, bool]] = {}  # by id, with the node so that the id stays its own
        self._regexes: dict[int, tuple[ast.Automaton, Node]] = {}  # likewise, of automata that are regular
        self._graphs: dict[int, tuple[ast.Graph, str, bool]] = {}  # likewise; a name, or the body of a row
        self._optional: set[Node] = set()
        self._names_of_bodies: dict[str, str] = {}
        self._words: dict[str, str] = {}  # of rules, by name, once that is no terminal
        self._options: dict[Node, str] = {}  # empty for what was met once
        self._met: set[str] = set()  # bodies of rules that may be wanted again
        self._groups: dict[str, int] = {}  # and how often each was met

    def write(self, node: Node) -> str:
        text = super().write(node)
        if len(self._bodies) + self._num_fresh > 1.5 * MAX_SYMBOLS:  # some rules may be no symbols of their own
            raise GrammarError(TOO_MANY_SYMBOLS)
        return text

    def _body(self, node: Node) -> str:
        if type(node) is ast.Repeat and (node.min, node.max) == (0, 1) and not self._is_regular(node):
            return f"{self._body(node.item)}|"
        return self._text(node)[0]

    def _text(self, node: Node) -> _Text:
        """`node` as an expression of rules and terminals."""
        if type(node) is ast.Rule:
            return _of_use(self._words.get(node.name) or self._word(node.name))
        if type(node) is ast.Concat and (row := self._row(node.items)) is not None:
            return row, _SEQUENCE
        return self._other_text(node)

    def _other_text(self, node: Node) -> _Text:
        """The same of what is neither a rule nor a row of what is not regular."""
        if self._is_regular(node):
            return _of_use(self._terminal_use(node))
        if isinstance(node, ast.Concat):
            return self._concat(node.items)
        if isinstance(node, ast.Graph):
            return self._graph(node), _ATOM
        if isinstance(node, ast.Repeat):
            part = self._text(node.item)
            if part[1] != _ATOM and (node.min, node.max) == (0, 1):
                return f"[{part[0]}]", _ATOM
            return f"{_grouped(part, _ATOM)}{quantifier(node.min, node.max)}", _SEQUENCE
        if isinstance(node, ast.Alternation):
            items = as_one(node.items, self._rules, self._is_regular)
            regular, others = list[Node](), list[Node]()
            for item in items:
                (regular if self._is_regular(item) else others).append(item)
            if regular:
                others.insert(0, ast.alternation(*regular))
            return "|".join([self._body(item) for item in others]), _CHOICE
        if isinstance(node, ast.Automaton):
            return self._short_automaton(node), _ATOM
        assert isinstance(node, ast.Intersection | ast.Difference)
        return self._short_automaton(product(node)), _ATOM

    def _row(self, items: tuple[Node, ...]) -> str | None:
        """The items one after the other; None if one of them is regular, as its neighbours may be as well."""
        for item in items:
            if type(item) not in _OF_RULES and self._is_regular(item):
                return None
        text, known = "", self._words
        for item in items:
            word = (known.get(item.name) or self._word(item.name)) if type(item) is ast.Rule else self.in_sequence(item)
            is_told = not text or text[-1] in CLOSING or word[0] in OPENING
            text = text + word if is_told else f"{text} {word}"
        return text

    def _word(self, name: str) -> str:
        """A rule where it is named, or the terminal that it is."""
        body = self._rules.get(name)
        if body is None:
            return self._named(name)
        if self._is_regular(body):
            word = self._terminal_use(body)
            if word[0] != "s":  # it is written out
                return word
        else:
            word = self._written.setdefault(name, self._names[name])
        self._words[name] = word
        return word

    def _concat(self, items: tuple[Node, ...]) -> _Text:
        """A terminal takes all it can, so one that something optional follows is also written joined to it."""
        runs = self._runs(items)
        for i, (run, after) in enumerate(zip(runs, runs[1:], strict=False)):
            if isinstance(after, (ast.Alternation, ast.Repeat)) and self._is_regular(run) and not _loops(after):
                ways = after.items if isinstance(after, ast.Alternation) else (ast.EMPTY, after.item)
                found = [self._body(ast.concat(*runs[:i], run, way, *runs[i + 2 :])) for way in ways]
                return "|".join(found), _CHOICE
        return joined([self.in_sequence(run) for run in runs]), _SEQUENCE

    def in_sequence(self, node: Node) -> str:
        """`node` beside others: in parentheses if it is a choice. Parentheses that come again have a rule."""
        if type(node) is ast.Rule:
            return self._words.get(node.name) or self._word(node.name)
        if type(node) is ast.Concat and (row := self._row(node.items)) is not None:
            return row
        text, level = self._other_text(node)
        is_option = type(node) is ast.Repeat and text[-1] == "]"
        if level != _CHOICE and not is_option and (type(node) is not ast.Repeat or text[-2] != ")"):
            return text
        uses = self._groups[text] = self._groups.get(text, 0) + 1
        if uses > 1:
            return self.shared(f"{text[1:-1]}|" if is_option else text)
        return _grouped((text, level), _SEQUENCE)

    def _graph(self, node: ast.Graph) -> str:
        """A rule for each state, which says how the walk goes on, but for those that are written where they are met."""
        known = self._graphs.get(id(node))
        if known is None:
            is_row = is_optional_row(node)
            if is_row:
                text = self._optional_row(node.rows)
            elif len(node.rows) > MAX_STATES and depth(node) > MAX_DEPTH:
                text = Segments(node, self).write()
            else:
                text = Walk(node, self).write()
            known = self._graphs[id(node)] = (node, text, is_row)
        return self.written(known[1]) if known[2] else known[1]

    def _optional_row(self, rows: tuple[tuple[tuple[Node, int], ...], ...]) -> str:
        """The same of parts that may each be left out, the last perhaps repeated, with a mark between two of them."""
        parts = [self._part(row[0][0]) for row in rows[1::2]]
        return write_row(self, self.in_sequence(rows[2][0][0]), parts, repeats=bool(rows[-1]))

    def _part(self, node: Node) -> str:
        """`node` beside others, or the rule of it if it takes more than two words."""
        text = self.in_sequence(node)
        if type(node) is ast.Concat and len(node.items) == 2:  # most members: a name and the rule of a value
            one, other = node.items
            if type(one) is ast.Rule is type(other):
                return text
        return text if is_short(text) else self.shared(text)

    def _add(self, name: str, body: str) -> None:
        """A rule that says what another says is that one, unless its own name is in use."""
        own = self._names[name]
        known = body if is_rule(body) else self._names_of_bodies.setdefault(body, own)
        if known != own and name not in self._written:
            self._written[name] = known
        else:
            self._bodies.append(f"{own}:{body}")

    def shared(self, body: str) -> str:
        """The name of a rule of this body: one that there is already, or a new one; a body that is a name has none."""
        name = self._names_of_bodies.get(body)
        if name is None:
            if "|" not in body and is_rule(body):
                return body
            name = self._names_of_bodies[body] = self.fresh()
            self.define(name, body)
        return name

    def written(self, body: str) -> str:
        if self.is_met(body):
            return self.shared(body)
        is_option = body[-1] == "|" and "|" not in body[:-1]
        return f"[{body[:-1]}]" if is_option else f"({body})"

    def option(self, node: Node) -> str | None:
        known = self._options.get(node)
        if known == "":
            known = self.shared(f"{self.in_sequence(node)}|")
        self._options[node] = known or ""
        return known

    def is_shared(self, body: str) -> bool:
        return body in self._names_of_bodies

    def is_met(self, body: str) -> bool:
        if body in self._names_of_bodies or body in self._met:
            return True
        self._met.add(body)
        return False

    def looping(self, body: str) -> str:
        name = self._names_of_bodies.get(body)
        if name is None:
            name = self._names_of_bodies[body] = self.fresh()
            self.define(name, body.replace(ITSELF, name))
        return name

    def _short_automaton(self, node: ast.Automaton) -> str:
        if len(node.rows) > MAX_STATES:
            node = minimal(node, MAX_STATES)
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
        return f"/{char_class(ranges)}/"

    def _terminal_use(self, node: Node) -> str:
        """A terminal in a rule. What is used a fourth time has a rule: each use is a symbol of its own."""
        if isinstance(node, ast.Empty):
            return '""'
        key = node.data if type(node) is ast.Literal else id(node)
        known = self._uses.get(key)
        if known is None:
            if len(self._uses) >= MAX_TERMINALS:
                raise GrammarError(
                    f"the constraint has more than {MAX_TERMINALS:,} different names and values between brackets and "
                    "commas; split it, or describe them by a pattern or by bounds"
                )
            word = self._new_use(node)
            self._uses[key] = (node, word, 1)
            return word
        _, word, times = known
        if times == _MAX_WRITTEN:
            text, word = word, self.fresh()
            self.define(word, text)
        if times <= _MAX_WRITTEN:
            self._uses[key] = (node, word, times + 1)
        return word

    def _new_use(self, node: Node) -> str:
        if isinstance(node, ast.Literal):
            return string(node.data)
        if self._regexes:
            node = self._without_automata(node)
        name = self._terminal(node)
        if not ast.nullable(node):
            return name
        # a terminal must not match the empty text: the rule makes it optional instead
        some = f"{name}_SOME"
        if node not in self._optional:
            self._optional.add(node)
            self._lines.append(f"{some}: {name} & /(?s:.+)/")
        return f"{some}?"

    def _without_automata(self, node: Node) -> Node:
        """`node`, which is regular, with regexes in place of its automata."""
        if isinstance(node, ast.Automaton):
            return self._regexes[id(node)][1]
        return ast.map_children(self._without_automata, node)

    def _terminal(self, node: Node) -> str:
        if node not in self._terminals:
            name = f"T{len(self._terminals)}"
            self._terminals[node] = name
            self._lines.append(f"{name}: {self._expression(node)[0]}")
        return self._terminals[node]

    def _in_terminal(self, node: Node, level: int) -> str:
        """`node` in the definition of a terminal: most are in one only, some stand for themselves."""
        if isinstance(node, ast.Literal):
            return string(node.data)
        if isinstance(node, ast.Repeat) or node in self._terminals:
            return self._terminal(node)
        return _grouped(self._expression(node), level)

    def _expression(self, node: Node) -> _Text:
        """`node` as the definition of a terminal: a regex, but for intersections and differences."""
        match node:
            case _ if (regex := plain(node)) is not None:
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
        """Whether a terminal can hold `node`; most automata take rules, as regexes have no states."""
        kind = type(node)
        if kind in _OF_RULES:
            return False
        if kind in _PLAIN:
            return True
        if isinstance(node, _OF_ITEMS) and node.items and type(node.items[0]) is ast.Rule:
            return False
        known = self._regular.get(id(node))
        if known is None:
            found = True
            if isinstance(node, _OF_ITEMS):
                for item in node.items:
                    if type(item) not in _PLAIN and (type(item) in _OF_RULES or not self._is_regular(item)):
                        found = False
                        break
            elif isinstance(node, ast.Repeat):
                found = self._is_regular(node.item)
            elif isinstance(node, ast.Difference):
                found = self._is_regular(node.item) and self._is_regular(node.minus)
            elif isinstance(node, ast.Automaton):
                regex = short_regex(node)
                found = regex is not None
                if regex is not None:
                    self._regexes[id(node)] = node, regex
            known = self._regular[id(node)] = (node, found)
        return known[1]


_OF_RULES = frozenset({ast.Rule, ast.Graph})
_PLAIN = frozenset({ast.Literal, ast.CharSet})
_OF_ITEMS = (ast.Concat, ast.Alternation, ast.Intersection)


def _of_use(use: str) -> _Text:
    return use, _SEQUENCE if use[-1] == "?" else _ATOM


def _grouped(text: _Text, level: int) -> str:
    """`text` where nothing looser than `level` may stand."""
    return text[0] if text[1] <= level else f"({text[0]})"


def _loops(node: ast.Alternation | ast.Repeat) -> bool:
    return isinstance(node, ast.Repeat) and (node.min, node.max) != (0, 1)
