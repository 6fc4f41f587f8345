"""What a grammar's text defines, and what is wrong with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import NoReturn

from graftlm.core.errors import GrammarError
from graftlm.core.grammar import ast
from graftlm.core.grammar.ast import Node
from graftlm.core.grammar.definitions.left_recursion import holding, without_left_recursion
from graftlm.core.grammar.definitions.tokens import fail, place_of
from graftlm.core.grammar.shared_nodes import ComposedNode
from graftlm.core.grammar.spec import Issue
from graftlm.core.grammar.survey import survey

_MAX_DEPTH = 1_000
"""Rules and groups inside each other; llguidance, which compiles them recursively, needs a stack of 8 MB for 2,000."""


@dataclass
class Definitions:
    """The rules of a grammar's text.

    start   the rule that the text is derived from
    rules   what each rule derives, by name; the references in it are Rule nodes
    places  offset of each rule's definition
    uses    offset of each name's first use in the body of a rule, by the rule and the name
    levels  how deep in groups each of them stands at most
    roots   what is read beside the start, as what may stand between two terminals
    imported  rules that no line of the text defines
    doubts  what seems wrong with patterns, by offset; only another reader of them can be sure
    num_terminals  texts and patterns in rules that are no terminals themselves
    opaque  what the nodes do not keep ("" if they keep all): something that only llguidance knows
    """

    text: str
    start: str
    rules: dict[str, Node] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)
    uses: dict[tuple[str, str], int] = field(default_factory=dict)
    levels: dict[tuple[str, str], int] = field(default_factory=dict)
    roots: list[Node] = field(default_factory=list)
    imported: set[str] = field(default_factory=set)
    doubts: list[tuple[int, str]] = field(default_factory=list)
    num_terminals: int = 0
    opaque: str = ""

    def use(self, rule: str, name: str, at: int, level: int) -> None:
        """Note that `rule` names `name`."""
        self.uses.setdefault((rule, name), at)
        self.levels[rule, name] = max(level, self.levels.get((rule, name), 0))

    def define(self, name: str, node: Node, at: int) -> None:
        if name in self.rules:
            first = place_of(self.text, self.places[name])
            fail(self.text, at, f"the rule {name!r} is defined twice (first in {first}); join the two with |")
        self.rules[name], self.places[name] = node, at

    def checked(self) -> Definitions:
        """These, once all names are defined and every rule that the start leads to has a text."""
        if self.start not in self.rules:
            known = ", ".join(list(self.rules)[:8]) or "none"
            fail(
                self.text,
                0,
                f"there is no rule {self.start!r}, which the text is derived from; "
                f"name one of the rules {self.start!r} (there are: {known})",
            )
        for (_, name), at in self.uses.items():
            if name not in self.rules:
                self._undefined(name, at)
        ending = holding(self.rules, _ends)
        for name in self.reached():
            if name not in ending:
                self._endless(name, ending)
        return self

    def reached(self) -> dict[str, None]:
        """The rules that the start leads to, itself first."""
        found = dict.fromkeys([self.start, *(name for root in self.roots for name in _names(root))])
        work = list(found)
        while work:
            for name in _names(self.rules[work.pop()]):
                if name not in found:
                    found[name] = None
                    work.append(name)
        return found

    def language(self, max_places: int) -> tuple[Node, dict[str, Node]]:
        """The start and the rules that it leads to; no rules where none names itself and all take few places."""
        order, recursive = self._inner_first(self.rules)
        rules = {name: self.rules[name] for name in order}
        if recursive:
            rules = without_left_recursion(rules)
            order, recursive = self._inner_first(rules)
        places: dict[str, int] = {}
        for name in order:
            found = survey(rules[name])
            places[name] = found.num_places + sum(places.get(inner, 0) for inner in found.rules)
        if recursive or places[self.start] > max_places:
            if any(_combines_rules(node) for node in rules.values()):
                raise GrammarError(f"terminals joined by & take more than {max_places:,} places; make them shorter")
            return rules[self.start], rules
        return _written_out(rules[self.start], rules), {}

    def check_depth(self) -> None:
        """Raise GrammarError where rules lead to one another so deep that llguidance would overflow the stack."""
        self._inner_first(self.rules, _MAX_DEPTH)

    def _inner_first(self, rules: dict[str, Node], max_depth: int | None = None) -> tuple[list[str], bool]:
        """The names of `rules` that the start leads to, each after those it names; and whether one names itself."""
        done, opened = dict[str, None](), {self.start}
        depth, recursive = 1, False
        work = [(self.start, iter(_names(rules[self.start])), 1)]
        while work:
            name, left, levels = work[-1]
            below = next(left, None)
            if below is None:
                work.pop()
                opened.discard(name)
                done[name] = None
                depth -= levels
            elif below in opened:
                recursive = True
            elif below not in done:
                levels = 1 + self.levels.get((name, below), 0)
                depth += levels
                if max_depth is not None and depth > max_depth:
                    fail(
                        self.text,
                        self.places[below],
                        f"the rule {below!r} lies more than {max_depth:,} rules and "
                        f"groups deep in {self.start!r}; flatten them, for example by repeats",
                    )
                opened.add(below)
                work.append((below, iter(_names(rules[below])), levels))
        return list(done), recursive

    def unused(self) -> tuple[Issue, ...]:
        """A note for each rule that the start does not lead to."""
        reached = {*self.reached(), *self.imported}
        return tuple(
            Issue(
                place_of(self.text, self.places[name]),
                name,
                f"the rule {name!r} is not used: {self.start!r} does not lead to it",
            )
            for name in self.rules
            if name not in reached
        )

    def _undefined(self, name: str, at: int) -> NoReturn:
        near = get_close_matches(name, self.rules, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "define it, or put it in double quotes if it is text"
        fail(self.text, at, f"there is no rule {name!r}; {hint}")

    def _endless(self, name: str, ending: set[str]) -> NoReturn:
        needs = next((inner for inner in _names(self.rules[name]) if inner not in ending), None)
        if needs is None:
            reason = f"the rule {name!r} matches no text; correct its patterns or remove it"
        else:
            itself = "itself" if needs == name else repr(needs)
            reason = (
                f"the rule {name!r} matches no text that ends: each of its alternatives needs {itself} again; "
                "add an alternative that does not"
            )
        fail(self.text, self.places[name], reason)


def _names(node: Node) -> tuple[str, ...]:
    """The rules that `node` names, in the order of the text."""
    return survey(node).inner


def _ends(node: Node, ending: set[str]) -> bool:
    """Whether `node` has a text, if these rules have one. Regular parts other than NOTHING are taken to."""
    if isinstance(node, ast.Rule):
        return node.name in ending
    if isinstance(node, ast.Concat):
        return all(_ends(item, ending) for item in node.items)
    if isinstance(node, ast.Alternation):
        return any(_ends(item, ending) for item in node.items)
    if isinstance(node, ast.Repeat):
        return node.min == 0 or _ends(node.item, ending)
    return True


def _combines_rules(node: Node) -> bool:
    """Whether an intersection in `node` names rules, which no automaton of rules can follow."""
    if isinstance(node, ast.Intersection):
        return bool(_names(node))
    if isinstance(node, ast.Concat | ast.Alternation):
        return any(map(_combines_rules, node.items))
    return isinstance(node, ast.Repeat) and _combines_rules(node.item)


def _written_out(node: Node, rules: dict[str, Node]) -> Node:
    """`node` with every rule written out where it is named; none of them may name itself."""
    done: dict[str, Node] = {}

    def written(part: Node) -> Node:
        if isinstance(part, ast.Rule):
            if part.name not in done:
                done[part.name] = written(rules[part.name])
            return done[part.name]
        if not isinstance(part, ComposedNode) or not _names(part):
            return part
        if isinstance(part, ast.Concat):
            return ast.concat(*map(written, part.items))
        if isinstance(part, ast.Alternation):
            return ast.alternation(*map(written, part.items))
        if isinstance(part, ast.Repeat):
            return ast.repeat(written(part.item), part.min, part.max)
        return ast.map_children(written, part)

    return written(node)
