"""Formulas of shapes, decided step by step: while a container is read, each value decides some of its shapes.

A formula is a narrowed shape: Union and Both of shapes of one kind (its leaves) and of Not of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.budget import check
from graftlm.core.grammar.nodes import nodes
from graftlm.core.grammar.nodes.nodes import EMPTY, Node
from graftlm.core.grammar.schema.algebra.shapes import (
    ANYTHING,
    NOTHING,
    Both,
    Literals,
    Not,
    Shape,
    Union,
    both,
    negation,
    union,
)

MAX_PLACES = 4_000

Formula = Shape


def leaves(formula: Formula) -> tuple[Shape, ...]:
    """The shapes that a formula depends on, in order."""
    match formula:
        case Union(parts) | Both(parts):
            # kept with the formula, as long as that is in use
            found: tuple[Shape, ...] | None = formula.__dict__.get("_leaves")
            if found is None:
                found = tuple(dict.fromkeys([leaf for part in parts for leaf in leaves(part)]))
                formula.__dict__["_leaves"] = found
            return found
        case Not(inner):
            return (inner,)
        case _:
            return () if formula == ANYTHING else (formula,)


def leaf_set(formula: Formula) -> frozenset[Shape]:
    if not isinstance(formula, (Union, Both)):
        return frozenset(leaves(formula))
    found: frozenset[Shape] | None = formula.__dict__.get("_leaf_set")
    if found is None:
        found = formula.__dict__["_leaf_set"] = frozenset(leaves(formula))
    return found


def decide(formula: Formula, some: frozenset[Shape], hold: bool) -> Formula:
    """`formula` once it is known that some of its leaves hold, or that they do not."""
    return _decide(formula, some, hold, {})


def _decide(formula: Formula, some: frozenset[Shape], hold: bool, known: dict[Formula, Formula]) -> Formula:
    if isinstance(formula, (Union, Both)):
        found = known.get(formula)  # parts may stand in many places
        if found is None:
            found = known[formula] = _joined(formula, some, hold, known)
        return found
    if isinstance(formula, Not):
        return formula if formula.shape not in some else NOTHING if hold else ANYTHING
    return formula if formula not in some else ANYTHING if hold else NOTHING


def _joined(formula: Union | Both, some: frozenset[Shape], hold: bool, known: dict[Formula, Formula]) -> Formula:
    if leaf_set(formula).isdisjoint(some):
        return formula
    is_union = isinstance(formula, Union)
    parts = formula.alternatives if isinstance(formula, Union) else formula.parts
    settling = ANYTHING if is_union else NOTHING
    if not _settling_leaves(formula, parts, hold == is_union).isdisjoint(some):
        return settling
    if _is_flat(formula, parts):
        return _decide_flat(formula, parts, some)
    decided = []
    for part in parts:
        left = _decide(part, some, hold, known)
        if left is settling:
            return left
        decided.append(left)
    return union(*decided) if is_union else both(*decided)


def _is_flat(formula: Union | Both, parts: tuple[Shape, ...]) -> bool:
    """Whether each part is another leaf, or Not of one."""
    found: bool | None = formula.__dict__.get("_flat")
    if found is None:
        is_nested = any([isinstance(part, (Union, Both)) for part in parts])
        found = formula.__dict__["_flat"] = not is_nested and len(leaves(formula)) == len(parts)
    return found


def _settling_leaves(formula: Union | Both, parts: tuple[Shape, ...], positive: bool) -> frozenset[Shape]:
    """The leaves that are a part themselves or, unless `positive`, whose Not is: any of them may settle the formula."""
    name = "_positive" if positive else "_negative"
    found: frozenset[Shape] | None = formula.__dict__.get(name)
    if found is None:
        if positive:
            found = frozenset([part for part in parts if not isinstance(part, (Union, Both, Not))])
        else:
            found = frozenset([part.shape for part in parts if isinstance(part, Not)])
        formula.__dict__[name] = found
    return found


def _decide_flat(formula: Union | Both, parts: tuple[Shape, ...], some: frozenset[Shape]) -> Formula:
    """The same of a flat formula: there may be many, with many leaves, of which some more are decided each time."""
    is_union = isinstance(formula, Union)
    in_order = leaves(formula)
    left = tuple([part for part, leaf in zip(parts, in_order, strict=True) if leaf not in some])
    if len(left) < 2:
        return left[0] if left else NOTHING if is_union else ANYTHING
    found = Union(left) if is_union else Both(left)
    if "_leaves" not in found.__dict__:
        found.__dict__["_leaves"] = tuple([leaf for leaf in in_order if leaf not in some])
        found.__dict__["_flat"] = True
    return found


def accepts(formula: Formula, certain: Callable[[Shape, bool], bool]) -> bool:
    """Whether `formula` holds; `certain(leaf, holds)` says whether a leaf certainly holds, or certainly does not."""
    return _accepts(formula, certain, {})


def _accepts(formula: Formula, certain: Callable[[Shape, bool], bool], known: dict[Formula, bool]) -> bool:
    if formula not in known:  # parts may stand in many places
        check()
        match formula:
            case Union(parts):
                known[formula] = any(_accepts(part, certain, known) for part in parts)
            case Both(parts):
                known[formula] = all(_accepts(part, certain, known) for part in parts)
            case Not(inner):
                known[formula] = certain(inner, False)
            case _:
                known[formula] = formula == ANYTHING or certain(formula, True)
    return known[formula]


@dataclass(frozen=True)
class Question:
    """Whether the value at hand has `shape`: if not, the leaves `fails` do not hold; if so, counters `counts` go up."""

    shape: Shape
    fails: frozenset[Shape] = frozenset()
    counts: tuple[int, ...] = ()


Outcome = tuple[Formula, tuple[int, ...]]
"""What is left to hold, and the counters that went up."""


def branch(
    formula: Formula, questions: Sequence[Question], reduced: Callable[[Shape], Shape]
) -> Iterator[tuple[Shape, Outcome]]:
    """What the value at hand may be, and what follows for each case; `reduced` simplifies shapes."""
    found: dict[Outcome, list[Shape]] = {}
    work: list[tuple[Formula, int, Shape, tuple[int, ...]]]
    constants = [question for question in questions if _is_constant(question)]
    if len(constants) > 1:
        questions = [question for question in questions if not _is_constant(question)]
        work = [(left, 0, value, counts) for left, value, counts in _told_apart(formula, constants, reduced)]
    else:
        work = [(formula, 0, ANYTHING, ())]
    while work:
        left, i, value, counts = work.pop()
        if left == NOTHING or value == NOTHING:
            continue
        if i == len(questions):
            found.setdefault((left, counts), []).append(value)
            if len(found) > MAX_PLACES:
                raise GrammarError("too many combinations of anyOf, oneOf, not and if; combine fewer of them")
            continue
        question = questions[i]
        failed = decide(left, question.fails, False)
        if failed == left and not question.counts:
            work.append((left, i + 1, value, counts))
            continue
        if failed != NOTHING:
            work.append((failed, i + 1, reduced(both(value, negation(question.shape))), counts))
        work.append((left, i + 1, reduced(both(value, question.shape)), counts + question.counts))
    for outcome, values in found.items():
        yield union(*values), outcome


def _is_constant(question: Question) -> bool:
    """Whether only some strings answer a question."""
    shape = question.shape
    return isinstance(shape, Literals) and all(text[0] == '"' for text in shape.texts)


def _told_apart(
    formula: Formula, constants: Sequence[Question], reduced: Callable[[Shape], Shape]
) -> Iterator[tuple[Formula, Shape, tuple[int, ...]]]:
    """What is left to hold, and counted, for all values but some strings, and for those; the first string is last."""
    failing = frozenset().union(*(question.fails for question in constants))
    holding: dict[str, tuple[set[Shape], list[int]]] = {}
    for question in constants:
        assert isinstance(question.shape, Literals)
        for text in question.shape.texts:
            held, counts = holding.setdefault(text, (set(), []))
            held.update(question.fails)
            counts += question.counts
    needed = failing.intersection(formula.parts) if isinstance(formula, Both) else frozenset[Shape]()
    rest = decide(formula, failing, False)
    texts: dict[Outcome, list[str]] = {}
    for text, (held, counts) in holding.items():
        left = decide(formula, failing - held, False) if needed <= held else NOTHING
        if counts or left != rest:
            texts.setdefault((left, tuple(counts)), []).append(text)
    if rest != NOTHING:
        apart = tuple(text for group in texts.values() for text in group)
        yield rest, reduced(negation(Literals(apart))) if apart else ANYTHING, ()
    for (left, ups), group in reversed(texts.items()):
        yield left, Literals(tuple(group)), ups


class Walk:
    """Members or items one after the other with commas between, as a graph under construction.

    A place is where a walk stands between two of them, and whether one was written already.
    """

    def __init__(self, comma: Node) -> None:
        self._comma = comma
        self._rows: list[list[tuple[Node, int]]] = []
        self._accepting: set[int] = set()

    def place(self) -> int:
        """The number of a new place; the walk begins with the first."""
        if len(self._rows) > 4 * MAX_PLACES:
            raise GrammarError(f"an object or array needs more than {MAX_PLACES:,} places; allow fewer combinations")
        self._rows.append([])
        return len(self._rows) - 1

    def accept(self, place: int) -> None:
        self._accepting.add(place)

    def skip(self, place: int, target: int) -> None:
        self._rows[place].append((EMPTY, target))

    def way(self, node: Node, target: int) -> int:
        """The number of one more member or item, which may be written from several places."""
        way = self.place()
        self._rows[way].append((node, target))
        return way

    def write(self, place: int, written: bool, way: int) -> None:
        """Let a way begin in a place."""
        self._rows[place].append((self._comma if written else EMPTY, way))

    def node(self) -> Node:
        return nodes.graph(self._rows, self._accepting)
