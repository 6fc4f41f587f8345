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

Int32Array: TypeAlias = "npt.NDArray[np.int32]"
Int64Array: TypeAlias = "npt.NDArray[np.int64]"

MAX_STATES = 20_000
# A byte that UTF-8 never uses: added as a text of its own, it keeps the automaton of an empty language buildable.
_NEVER = 0xFF


@lru_cache(maxsize=512)
def product(node: Intersection | Difference) -> Automaton:
    """The automaton of `node`, without dead ends. Raises GrammarError over MAX_STATES states."""
    return _as_automaton(_table(node))


def without_products(node: Node) -> Node:
    """`node` with every intersection and difference in it replaced by its automaton."""
    return _without_products(node, {})


def _without_products(node: Node, done: dict[int, Node]) -> Node:
    """`done` is by id: shared nodes are visited once and stay shared."""
    found = done.get(id(node))
    if found is None:
        if isinstance(node, (Intersection, Difference)):
            found = product(node)
        else:
            found = ast.map_children(lambda child: _without_products(child, done), node)
        done[id(node)] = found
    return found


def is_empty(node: Node) -> bool:
    """Whether no text matches `node`."""
    return not _live(_table(node))[1]


def has_length(node: Node, low: int, high: int | None) -> bool:
    """Whether some text of `low` to `high` characters matches `node`; None is without bound."""
    table = _table(node)
    live = _live(table)
    states = np.array([1] if live[1] else [], np.int32)
    length = 0
    while len(states) and (high is None or length <= high):
        check()
        if length >= low and (high is None or table.accepting[states].any()):
            return True
        states, length = _after_character(table, live, states), length + 1
    return False


def _after_character(table: _Table, live: npt.NDArray[np.bool_], states: Int32Array) -> Int32Array:
    """The live states that one more character of UTF-8 leads to."""
    found = [table.after(states, 0, 0x7F)]
    for first, last, num_more in ((0xC2, 0xDF, 1), (0xE0, 0xEF, 2), (0xF0, 0xF4, 3)):
        inside = table.after(states, first, last)
        for _ in range(num_more):
            inside = table.after(inside, 0x80, 0xBF)
        found.append(inside)
    after = np.unique(np.concatenate(found))
    return after[live[after]]


def matches(node: Node, text: str) -> bool:
    """Whether `node` matches the whole of `text`."""
    try:
        data = text.encode()
    except UnicodeEncodeError:
        return False
    table, state = _table(node), 1
    for byte in data:
        state = table.targets[state, table.classes[byte]]
    return bool(table.accepting[state])


class _Table:
    """An automaton as arrays, with bytes that no state tells apart in one class.

    classes    int64 [256]: the class of each byte
    targets    int32 [num_states, num_classes]: the next state; state 0 is dead, 1 starts
    accepting  bool [num_states]
    """

    def __init__(self, classes: Int64Array, targets: Int32Array, accepting: npt.NDArray[np.bool_]) -> None:
        self.classes = classes
        self.targets = targets
        self.accepting = accepting

    def after(self, states: Int32Array, first: int, last: int) -> Int32Array:
        """The states that a byte from `first` to `last` leads to from any of `states`, each once."""
        return np.unique(self.targets[np.ix_(states, np.unique(self.classes[first : last + 1]))])


@lru_cache(maxsize=128)
def _table(node: Node) -> _Table:
    """The table of `node`; products have no dead ends in it."""
    match node:
        case Automaton():
            return _expand(node)
        case Intersection(items):
            return reduce(_both, map(_table, items))
        case Difference(item, minus):
            return _combine(_table(item), _table(minus), keep_if_second=False)
    node = ast.alternation(ast.Literal(bytes([_NEVER])), without_products(node))
    dfa = Dfa.compile(node, Limits(states=MAX_STATES), counters=False)
    targets = dfa.table.copy()
    targets[:, dfa.classes[_NEVER]] = 0  # no other byte is in its class
    return _Table(dfa.classes.astype(np.int64), targets, dfa.accepting)


def _expand(node: Automaton) -> _Table:
    cuts = {0, 256}.union(*({low, high + 1} for row in node.rows for low, high, _ in row))
    starts = np.array(sorted(cuts))
    class_of = {int(start): i for i, start in enumerate(starts)}
    targets = np.zeros((len(node.rows) + 1, len(starts) - 1), np.int32)
    accepting = np.zeros(len(node.rows) + 1, bool)
    for state, row in enumerate(node.rows, 1):
        for low, high, target in row:
            targets[state, class_of[low] : class_of[high + 1]] = target + 1
    accepting[[state + 1 for state in node.accepting]] = True
    return _Table(np.repeat(np.arange(len(starts) - 1), np.diff(starts)), targets, accepting)


def _both(first: _Table, second: _Table) -> _Table:
    return _combine(first, second, keep_if_second=True)


def _combine(a: _Table, second: _Table, *, keep_if_second: bool) -> _Table:
    """Walk both at once; without `keep_if_second` accept what `second` does not."""
    width, num_classes = len(second.targets), second.targets.shape[1]
    pairs_of_classes = (a.classes * num_classes + second.classes).tolist()
    joint = {pair: i for i, pair in enumerate(dict.fromkeys(pairs_of_classes))}
    classes = np.array([joint[pair] for pair in pairs_of_classes])
    in_a, in_second = np.divmod(np.array(list(joint)), num_classes)
    numbers: dict[int, int] = {width + 1: 1}  # both at their start
    rows: list[Int32Array] = [np.zeros((1, len(joint)), np.int32)]
    frontier = np.array([width + 1], np.int64)
    while len(frontier):
        left, right = a.targets[frontier // width][:, in_a], second.targets[frontier % width][:, in_second]
        alive = (left != 0) & (right != 0) if keep_if_second else left != 0
        found = np.where(alive, left.astype(np.int64) * width + right, 0).ravel()
        begins = np.flatnonzero(np.diff(found, prepend=-1))  # neighbours mostly lead to one state: sort few
        codes, inverse = np.unique(found[begins], return_inverse=True)
        new = [code for code in codes.tolist() if code and code not in numbers]
        numbers.update(zip(new, range(len(numbers) + 1, len(numbers) + 1 + len(new)), strict=True))
        check(in_a.nbytes * len(numbers))
        if len(numbers) > MAX_STATES:
            raise GrammarError(
                f"combining two patterns or lengths needs more than {MAX_STATES:,} states; use one of them alone"
            )
        targets = np.array([numbers[code] if code else 0 for code in codes.tolist()], np.int32)
        rows.append(np.repeat(targets[inverse], np.diff(begins, append=len(found))).reshape(alive.shape))
        frontier = np.array(new, np.int64)
    pairs = np.array([0, *numbers], np.int64)
    accepted = second.accepting[pairs % width]
    accepting = a.accepting[pairs // width] & (accepted if keep_if_second else ~accepted)
    accepting[0] = False
    return _trim(_Table(classes, np.concatenate(rows), accepting))


def _live(table: _Table) -> npt.NDArray[np.bool_]:
    """Which states can reach an accepting one."""
    num_states, num_classes = table.targets.shape
    edges = table.targets.ravel()
    order = np.argsort(edges, kind="stable")
    sources, begins = order // num_classes, np.searchsorted(edges[order], np.arange(num_states + 1))
    live = table.accepting.copy()
    work = np.flatnonzero(live)
    while len(work):
        check()
        found = np.concatenate([sources[begins[state] : begins[state + 1]] for state in work.tolist()])
        work = np.unique(found[~live[found]])
        live[work] = True
    live[0] = False
    return live


def _trim(table: _Table) -> _Table:
    """Number the states anew without those that cannot reach an accepting one; the start stays."""
    live = _live(table)
    if live[1:].all():
        return table
    live[:2] = True
    numbers = np.where(live, np.cumsum(live) - 1, 0).astype(np.int32)
    return _Table(table.classes, numbers[table.targets[live]], table.accepting[live])


def _as_automaton(table: _Table) -> Automaton:
    # neighbours in one class have one target: a run begins where the class of the byte does
    begins = np.flatnonzero(np.diff(table.classes, prepend=-1))
    targets = table.targets[1:][:, table.classes[begins]]
    cuts = np.concatenate([np.ones((len(targets), 1), bool), targets[:, 1:] != targets[:, :-1]], axis=1)
    states, columns = np.nonzero(cuts)
    lows = begins[columns]
    # a run ends where the next one begins, the last one of a state with the bytes
    highs = np.where(np.append(states[1:] != states[:-1], True), 256, np.append(lows[1:], 256)) - 1
    rows: list[list[tuple[int, int, int]]] = [[] for _ in targets]
    for state, low, high, target in zip(
        states.tolist(), lows.tolist(), highs.tolist(), targets[states, columns].tolist(), strict=True
    ):
        if target:
            rows[state].append((low, high, target - 1))
    return Automaton(tuple(map(tuple, rows)), frozenset((np.flatnonzero(table.accepting) - 1).tolist()))
