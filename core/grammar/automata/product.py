"""Intersections and differences of regular languages, as automata."""

from __future__ import annotations

from functools import lru_cache, reduce
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from graftlm.core.errors import GrammarError
from graftlm.core.grammar import ast
from graftlm.core.grammar.ast import Automaton, Difference, Intersection, Node
from graftlm.core.grammar.automata.dfa import Dfa
from graftlm.core.grammar.budget import check
from graftlm.core.grammar.spec import Limits

if TYPE_CHECKING:
    import numpy.typing as npt

Int64Array: TypeAlias = "npt.NDArray[np.int64]"

MAX_STATES = 20_000
# A byte that UTF-8 never uses: added as a text of its own, it keeps the automaton of an empty language buildable.
_NEVER = 0xFF


@lru_cache(maxsize=512)
def product(node: Intersection | Difference) -> Automaton:
    """The automaton of `node`, without dead ends. Raises GrammarError over MAX_STATES states."""
    if isinstance(node, Difference):
        return _combine(_table(node.item), _table(node.minus), keep_if_second=False)
    return reduce(
        lambda left, right: _combine(left, _table(right), keep_if_second=True),
        node.items[1:],
        _as_automaton(_table(node.items[0])),
    )


def without_products(node: Node) -> Node:
    """`node` with every intersection and difference in it replaced by its automaton."""
    done: dict[int, Node] = {}  # by id: shared nodes are visited once and stay shared

    def visit(node: Node) -> Node:
        found = done.get(id(node))
        if found is None:
            is_product = isinstance(node, (Intersection, Difference))
            found = done[id(node)] = product(node) if is_product else ast.map_children(visit, node)
        return found

    return visit(node)


def is_empty(node: Node) -> bool:
    """Whether no text matches `node`."""
    if isinstance(node, Automaton):
        return not node.accepting
    if isinstance(node, (Intersection, Difference)):
        return not product(node).accepting
    return not product(Intersection((node, ast.star(ast.ANY_CHAR)))).accepting


def has_length(node: Node, low: int, high: int | None) -> bool:
    """Whether some text of `low` to `high` characters matches `node`; None is without bound."""
    table = _table(node)
    live = _live(table.targets, table.accepting)
    states = np.array([1]) if live[1] else np.array([], np.int64)
    length = 0
    while len(states) and (high is None or length <= high):
        check()
        if length >= low and (high is None or table.accepting[states].any()):
            return True
        states, length = _after_character(table.targets, live, states), length + 1
    return False


def _after_character(targets: Int64Array, live: npt.NDArray[np.bool_], states: Int64Array) -> Int64Array:
    """The live states that one more character of UTF-8 leads to."""
    found = [targets[states, :0x80].ravel()]
    for first, last, num_more in ((0xC2, 0xDF, 1), (0xE0, 0xEF, 2), (0xF0, 0xF4, 3)):
        inside = np.unique(targets[states, first : last + 1])
        for _ in range(num_more):
            inside = np.unique(targets[inside, 0x80:0xC0])
        found.append(inside)
    after = np.unique(np.concatenate(found))
    return after[live[after]]


def matches(node: Node, text: str) -> bool:
    """Whether `node` matches the whole of `text`."""
    try:
        data = text.encode()
    except UnicodeEncodeError:
        return False
    automaton = node if isinstance(node, Automaton) else _matcher(node)
    state = 0
    for byte in data:
        target = next((to for low, high, to in automaton.rows[state] if low <= byte <= high), None)
        if target is None:
            return False
        state = target
    return state in automaton.accepting


@lru_cache(maxsize=512)
def _matcher(node: Node) -> Automaton:
    return _as_automaton(_table(node))


class _Table:
    """targets int64 [num_states, 256]: the next state; state 0 is dead, 1 starts. accepting bool [num_states]."""

    def __init__(self, targets: Int64Array, accepting: npt.NDArray[np.bool_]) -> None:
        self.targets = targets
        self.accepting = accepting


@lru_cache(maxsize=128)
def _table(node: Node) -> _Table:
    if isinstance(node, Automaton):
        return _expand(node)
    if isinstance(node, (Intersection, Difference)):
        return _expand(product(node))
    node = ast.alternation(ast.Literal(bytes([_NEVER])), without_products(node))
    dfa = Dfa.compile(node, Limits(states=MAX_STATES), counters=False)
    targets = dfa.table[:, dfa.classes].astype(np.int64)
    targets[:, _NEVER] = 0
    return _Table(targets, dfa.accepting)


def _expand(node: Automaton) -> _Table:
    targets = np.zeros((len(node.rows) + 1, 256), np.int64)
    accepting = np.zeros(len(node.rows) + 1, bool)
    for state, row in enumerate(node.rows, 1):
        for low, high, target in row:
            targets[state, low : high + 1] = target + 1
    accepting[[state + 1 for state in node.accepting]] = True
    return _Table(targets, accepting)


def _as_automaton(table: _Table) -> Automaton:
    return _trim(table.targets, table.accepting)


def _combine(first: _Table | Automaton, second: _Table, *, keep_if_second: bool) -> Automaton:
    """Walk both at once; without `keep_if_second` accept what `second` does not."""
    a = _expand(first) if isinstance(first, Automaton) else first
    width = len(second.targets)
    numbers: dict[int, int] = {width + 1: 1}  # both at their start
    rows: list[Int64Array] = [np.zeros(256, np.int64)]
    frontier = np.array([width + 1], np.int64)
    while len(frontier):
        left, right = a.targets[frontier // width], second.targets[frontier % width]
        alive = (left != 0) & (right != 0) if keep_if_second else left != 0
        codes, inverse = np.unique(np.where(alive, left * width + right, 0), return_inverse=True)
        new = [code for code in codes.tolist() if code and code not in numbers]
        numbers.update(zip(new, range(len(numbers) + 1, len(numbers) + 1 + len(new)), strict=True))
        check(2 * a.targets.itemsize * 256 * len(numbers))
        if len(numbers) > MAX_STATES:
            raise GrammarError(
                f"combining two patterns or lengths needs more than {MAX_STATES:,} states; use one of them alone"
            )
        targets = np.array([numbers[code] if code else 0 for code in codes.tolist()], np.int64)
        rows += list(targets[inverse.reshape(alive.shape)])
        frontier = np.array(new, np.int64)
    pairs = np.array([0, *numbers], np.int64)
    in_second = second.accepting[pairs % width]
    accepting = a.accepting[pairs // width] & (in_second if keep_if_second else ~in_second)
    accepting[0] = False
    return _trim(np.stack(rows), accepting)


def _live(targets: Int64Array, accepting: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Which states can reach an accepting one."""
    live = accepting.copy()
    while True:
        check()
        more = live | live[targets].any(axis=1)
        more[0] = False
        if (more == live).all():
            return live
        live = more


def _trim(targets: Int64Array, accepting: npt.NDArray[np.bool_]) -> Automaton:
    """Number the states anew without those that cannot reach an accepting one; the start stays."""
    live = _live(targets, accepting)
    live[1] = True
    numbers = np.cumsum(live) - 1
    kept = np.where(live, numbers, -1)[targets[live]]
    kept[targets[live] == 0] = -1
    cuts = np.concatenate([np.ones((len(kept), 1), bool), kept[:, 1:] != kept[:, :-1]], axis=1)
    states, lows = np.nonzero(cuts)
    # a run ends where the next one begins, the last one of a state with the bytes
    highs = np.where(np.append(states[1:] != states[:-1], True), 256, np.append(lows[1:], 256)) - 1
    rows: list[list[tuple[int, int, int]]] = [[] for _ in range(len(kept))]
    for state, low, high, target in zip(
        states.tolist(), lows.tolist(), highs.tolist(), kept[states, lows].tolist(), strict=True
    ):
        if target >= 0:
            rows[state].append((low, high, target))
    return Automaton(tuple(map(tuple, rows)), frozenset(numbers[np.flatnonzero(accepting & live)].tolist()))
