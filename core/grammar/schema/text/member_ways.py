"""What may follow each state of a walk over the members of an object: the same however its schema is lowered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, combinations
from typing import TYPE_CHECKING

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.automata.products import product
from graftlm.core.grammar.nodes import nodes
from graftlm.core.grammar.nodes.nodes import Node
from graftlm.core.grammar.schema.algebra import text_language
from graftlm.core.grammar.schema.algebra.shapes import ANYTHING, NOTHING, Both, Literals, Object, Shape, Text, both
from graftlm.core.grammar.schema.text import json_text
from graftlm.core.grammar.schema.text.branches import Formula, Question, accepts, branch, decide, leaf_set, leaves

if TYPE_CHECKING:
    from graftlm.core.grammar.schema.algebra.scalars import Scalar
    from graftlm.core.grammar.schema.algebra.shape_algebra import ShapeAlgebra

MAX_KINDS = 64
"""Combinations of patterns that a name matches together."""
MAX_COUNTED_NAMES = 64
"""Names that an object does not list, where they have to differ; of more only their text shows when they run out."""
MAX_UNCHECKED_KINDS = 16
"""From here on patterns are compared in pairs before they are combined."""

Counts = tuple[int, int]
"""Declared and other members so far, as far as bounds on their number need it."""

State = tuple[int, Formula, Counts]
"""How many names were passed, what is left to hold, and the members so far."""

_Test = tuple[str, ...] | Shape
"""Patterns of which a name matches one, or what `propertyNames` asks of it."""

Kind = tuple[tuple[_Test, ...], tuple[_Test, ...]]
"""Tests that a name passes, and those that it fails."""

Key = str | Kind
"""The name of a declared member, or the kind of name that another one has."""


@dataclass(slots=True)
class Ways:
    """What may follow a state: the end, the next name left out, or one of some members."""

    ends: bool = False
    absent: State | None = None
    present: list[tuple[Key, Shape, State]] = field(default_factory=list)


class MemberWays:
    """The ways of the objects for which `formula`, whose leaves are Objects, holds.

    names_differ  members with equal names are left out by other means
    pointers      where the leaves stand in the schema, for errors
    """

    def __init__(
        self, algebra: ShapeAlgebra, formula: Formula, pointers: Mapping[Shape, str], *, names_differ: bool
    ) -> None:
        self._algebra = algebra
        self._pointers = pointers
        self._objects = [leaf for leaf in leaves(formula) if isinstance(leaf, Object)]
        self._names_differ = names_differ and any(leaf.counts_names for leaf in self._objects)
        self.names = list(
            dict.fromkeys(
                [name for leaf in self._objects for name, _ in leaf.properties]
                + [name for leaf in self._objects for name in leaf.required]
            )
        )
        bounds = [leaf.min_properties for leaf in self._objects]
        bounds += [leaf.max_properties + 1 for leaf in self._objects if leaf.max_properties is not None]
        self._cap = max(bounds, default=0)
        self._closed: set[Shape] = set()  # leaves without members beyond those that they list
        never = _never_there(formula, self.names)
        if never:
            lacking = frozenset([leaf for leaf in self._objects if not never.isdisjoint(leaf.required)])
            formula = decide(formula, lacking, False)
        self.walked = [name for name in self.names if name not in never] if never else self.names
        # at each of these names: leaves that list it, what they say of it unless it is anything, those that require
        # it, and those that it settles
        self._listing: list[set[Shape]] = [set() for _ in self.walked]
        self._members: list[dict[Object, Shape]] = [{} for _ in self.walked]
        self._requiring: list[set[Shape]] = [set() for _ in self.walked]
        self._settled: list[set[Shape]] = [set() for _ in range(len(self.walked) + 2)]
        self._look_at_names()
        self.start: State = (0, self._settle(formula, 0), (0, 0))
        self._known: dict[State, Ways] = {}
        self._name_nodes: dict[Kind, Node | None] = {}

    def of(self, state: State) -> Ways:
        found = self._known.get(state)
        if found is None:
            found = self._known[state] = self._ways_from(state)
        return found

    def _ways_from(self, state: State) -> Ways:
        position, formula, counts = state
        found = Ways()
        is_other = position == len(self.walked)
        if is_other:
            found.ends = accepts(formula, lambda leaf, holds: self._certain(leaf, holds, counts))
            ways = self._others(formula)
        else:
            ways = self._declared(position, formula)
            absent = self._settle(self._without(position, formula), position + 1)
            if absent != NOTHING:
                found.absent = (position + 1, absent, self._kept(absent, counts))
        for key, value, after in ways:
            grown = (counts[0], counts[1] + 1) if is_other else (counts[0] + 1, counts[1])
            left = after if is_other else self._settle(after, position + 1)
            target = (position if is_other else position + 1, left, self._kept(left, grown))
            found.present.append((key, value, target))
        return found

    def _look_at_names(self) -> None:
        positions = {name: i for i, name in enumerate(self.walked)}
        for leaf in self._objects:
            is_simple = leaf.names is None and not leaf.patterns
            if is_simple and leaf.additional == NOTHING:
                self._closed.add(leaf)
            says_of_others = not (is_simple and leaf.additional in (ANYTHING, NOTHING))
            for name, shape in leaf.properties:
                position = positions.get(name)
                if position is not None:
                    self._listing[position].add(leaf)
                    if shape is not ANYTHING and not says_of_others:
                        self._members[position][leaf] = shape
            for name in self.walked if says_of_others else ():
                shape = self._algebra.member(leaf, name)
                if shape is not ANYTHING:
                    self._members[positions[name]][leaf] = shape
            for name in leaf.required:
                if name in positions:
                    self._requiring[positions[name]].add(leaf)
            self._settled[self._last_position(leaf, positions)].add(leaf)

    def _declared(self, position: int, formula: Formula) -> list[tuple[Key, Shape, Formula]]:
        alive = leaf_set(formula)
        others = (alive & self._closed) - self._listing[position]
        if others:
            formula = decide(formula, others, False)
            alive = leaf_set(formula)
        shapes = {leaf: shape for leaf, shape in self._members[position].items() if leaf in alive}
        key = self.walked[position]
        return [(key, value, after) for value, after in self._branch(formula, shapes)]

    def _branch(self, formula: Formula, shapes: dict[Object, Shape]) -> list[tuple[Shape, Formula]]:
        fails: dict[Shape, list[Shape]] = {}
        for leaf, shape in shapes.items():
            if shape != ANYTHING:
                fails.setdefault(shape, []).append(leaf)
        if NOTHING in fails:
            formula = decide(formula, frozenset(fails.pop(NOTHING)), False)
        key = (formula, tuple([(shape, frozenset(failing)) for shape, failing in fails.items()]))
        known = self._algebra.branches.get(key)
        if known is None and len(key[1]) == 1:
            ((shape, failing),) = key[1]
            if (
                formula != NOTHING and decide(formula, failing, False) == NOTHING
            ):  # the one thing that all say of most members
                value = self._algebra.reduced(shape)
                known = self._algebra.branches[key] = [(value, formula)] if value != NOTHING else []
        if known is None:
            questions = [Question(shape, failing) for shape, failing in key[1]]
            known = [(value, after) for value, (after, _) in branch(formula, questions, self._algebra.reduced)]
            self._algebra.branches[key] = known
        return known

    def _without(self, position: int, formula: Formula) -> Formula:
        requiring = self._requiring[position]
        return decide(formula, leaf_set(formula) & requiring, False) if requiring else formula

    def _last_position(self, leaf: Object, positions: dict[str, int]) -> int:
        """After so many names nothing can make `leaf` fail; one more than there are names if only the end decides."""
        free = leaf.additional == ANYTHING and leaf.names is None and all(s == ANYTHING for _, s in leaf.patterns)
        if not free or leaf.min_properties or leaf.max_properties is not None:
            return len(self.walked) + 1
        last = -1
        for name in leaf.required:
            last = max(last, positions.get(name, -1))
        for name, _ in leaf.properties:
            position = positions.get(name, -1)
            if position > last and leaf in self._members[position]:
                last = position
        return 1 + last

    def _settle(self, formula: Formula, position: int) -> Formula:
        """`formula` without the leaves that the last name has settled, or, before the first, that nothing can fail."""
        settled = self._settled[position]
        return decide(formula, leaf_set(formula) & settled, True) if settled else formula

    def _kept(self, formula: Formula, counts: Counts) -> Counts:
        """`counts` as far as they matter for what is left of the formula."""
        if not self._cap or not any(
            isinstance(leaf, Object) and (leaf.min_properties or leaf.max_properties is not None)
            for leaf in leaves(formula)
        ):
            return (0, 0)
        return min(counts[0], self._cap), min(counts[1], self._cap)

    def _certain(self, leaf: Shape, holds: bool, counts: Counts) -> bool:
        """Whether the number of members surely lets `leaf` hold, or fail: names not declared may come twice."""
        assert isinstance(leaf, Object)
        most = counts[0] + counts[1]
        least = most if self._names_differ else counts[0] + min(counts[1], 1)
        high = leaf.max_properties
        if holds:
            return least >= leaf.min_properties and (high is None or most <= high)
        return most < leaf.min_properties or (high is not None and least > high)

    def _others(self, formula: Formula) -> list[tuple[Key, Shape, Formula]]:
        """One member whose name is not declared: the name, what it may be, and what that leaves of the formula."""
        alive = tuple(leaf for leaf in leaves(formula) if isinstance(leaf, Object))
        tests: list[_Test] = [*_joined_patterns(alive)]
        tests += list(dict.fromkeys(leaf.names for leaf in alive if leaf.names is not None))
        found: list[tuple[Key, Shape, Formula]] = []
        for passed, failed in self._kinds_of_names(tests, alive):
            ways = list(self._branch(formula, {leaf: _other_member(leaf, passed) for leaf in alive}))
            if ways and self.name(passed, failed) != nodes.NOTHING:
                found += [((passed, failed), value, after) for value, after in ways]
        return found

    def _kinds_of_names(self, tests: list[_Test], alive: tuple[Object, ...]) -> list[Kind]:
        """Which tests a name may pass, and which it then fails; those that pass most come first."""
        kinds: list[Kind] = [((), ())]
        for test in tests:
            passing = [((*passed, test), failed) for passed, failed in kinds]
            if len(kinds) > MAX_UNCHECKED_KINDS:  # patterns of one object mostly exclude each other
                passing = [(passed, failed) for passed, failed in passing if self._fit_in_pairs(passed)]
            kinds = passing + [(passed, (*failed, test)) for passed, failed in kinds]
            if len(kinds) > MAX_KINDS:
                kinds = [(passed, failed) for passed, failed in kinds if self.name(passed, failed) != nodes.NOTHING]
            if len(kinds) > MAX_KINDS:
                raise GrammarError(
                    f"{len(tests)} patterns and propertyNames in one object, and names can match more than {MAX_KINDS} "
                    "combinations of them; give more of them equal schemas, or let patterns exclude each other",
                    pointer=next((self._pointers.get(leaf, "") for leaf in alive if leaf.patterns), ""),
                )
        place = {test: i for i, test in enumerate(tests)}
        return sorted(kinds, key=lambda kind: (-len(kind[0]), [place[test] for test in kind[0]]))

    def _fit_in_pairs(self, passed: tuple[_Test, ...]) -> bool:
        """Whether a name may pass the last of these tests together with each of the others."""
        return all(self.name((test, passed[-1]), ()) != nodes.NOTHING for test in passed[:-1])

    def name(self, passed: tuple[_Test, ...], failed: tuple[_Test, ...]) -> Node | None:
        """Names that are not declared, pass some tests and fail the others, as they are written; None for all names."""
        if (passed, failed) not in self._name_nodes:
            self._name_nodes[passed, failed] = self._name_node(passed, failed)
        return self._name_nodes[passed, failed]

    def _name_node(self, passed: tuple[_Test, ...], failed: tuple[_Test, ...]) -> Node | None:
        inside = [self._test_node(test, wide=False) for test in passed]
        outside = failing = [self._test_node(test, wide=True) for test in failed]
        if not passed and not failed:
            return None
        if self.names:
            outside = [*failing, nodes.alternation(*(json_text.inside(name) for name in self.names))]
        if not inside:
            inside = [nodes.star(json_text.NAME_CHAR)]
        node: Node = inside[0] if len(inside) == 1 else nodes.Intersection(tuple(inside))
        if outside:
            node = nodes.Difference(node, nodes.alternation(*outside))
        if not isinstance(node, nodes.Intersection | nodes.Difference):
            return node
        try:
            is_empty = _is_empty_in_pairs(inside, failing) or product.is_empty(node)
        except GrammarError:  # too large to say: an engine that takes it never begins a name that nothing matches
            is_empty = False
        return nodes.NOTHING if is_empty else node

    def _pieces(self, names: Shape) -> list[Scalar]:
        return self._algebra.pieces(names, "string")

    def _test_node(self, test: _Test, *, wide: bool) -> Node:
        if isinstance(test, tuple):
            return text_language.spelled_patterns(test, wide)
        pieces = self._pieces(test)
        if wide:  # everything but what surely fails
            failing = self._algebra.pieces(test, "string", outside=True)
            return nodes.Difference(nodes.star(json_text.NAME_CHAR), nodes.alternation(*map(_spelled, failing)))
        return nodes.alternation(*map(_spelled, pieces))


def _never_there(formula: Formula, names: list[str]) -> set[str]:
    """Names of members that a part of the whole formula forbids: those of others are many, and none of them is met."""
    never: set[str] = set()
    for part in formula.parts if isinstance(formula, Both) else (formula,):
        if isinstance(part, Object) and part.names is None and not part.patterns:
            never.update([name for name, shape in part.properties if shape == NOTHING])
            if part.additional == NOTHING:
                never.update([name for name in names if part.property(name) is None])
    return never


def _is_empty_in_pairs(inside: list[Node], failing: list[Node]) -> bool:
    """Whether two tests that are passed exclude each other, or one that is passed lies in one that is failed.

    Most combinations are empty for that, and pairs are few.
    """
    pairs: Iterator[Node] = chain(
        (nodes.Intersection(pair) for pair in combinations(inside, 2)),
        (nodes.Difference(item, minus) for item in inside for minus in failing),
    )
    try:
        return any(map(product.is_empty, pairs))
    except GrammarError:  # one of them is too large, which more failed tests may yet make small
        return False


def _spelled(piece: Shape) -> Node:
    """Names as they are written, one spelling each, without quotation marks."""
    match piece:
        case Literals(texts):
            return nodes.alternation(*(nodes.literal(text[1:-1]) for text in texts))
        case Text(low, high, (), (), (), (), ()):
            return nodes.repeat(json_text.NAME_CHAR, low, high)
        case Text():
            return text_language.node(piece)
        case _:
            raise AssertionError(piece)


def _joined_patterns(leaves: tuple[Object, ...]) -> list[tuple[str, ...]]:
    """The patterns of all leaves; those with which each leaf says the same of a member are one test."""
    said: dict[str, list[tuple[Object, Shape]]] = {}
    for leaf in leaves:
        for pattern, shape in leaf.patterns:
            said.setdefault(pattern, []).append((leaf, shape))
    joined: dict[tuple[tuple[Object, Shape], ...], list[str]] = {}
    for pattern, shapes in said.items():
        joined.setdefault(tuple(shapes), []).append(pattern)
    return [tuple(patterns) for patterns in joined.values()]


def _other_member(leaf: Object, passed: tuple[_Test, ...]) -> Shape:
    if leaf.names is not None and leaf.names not in passed:
        return NOTHING
    matched = {pattern for test in passed if isinstance(test, tuple) for pattern in test}
    fitting = [shape for pattern, shape in leaf.patterns if pattern in matched]
    return both(*fitting) if fitting else leaf.additional
