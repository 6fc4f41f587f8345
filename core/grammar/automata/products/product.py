"""Intersections and differences of regular languages, as automata."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial, reduce
from typing import TYPE_CHECKING

import numpy as np

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.automata.dfa import Dfa
from graftlm.core.grammar.automata.products import pairs
from graftlm.core.grammar.automata.products.byte_table import ByteTable, Int32Array
from graftlm.core.grammar.budget import check
from graftlm.core.grammar.nodes import nodes
from graftlm.core.grammar.nodes.nodes import Automaton, Difference, Intersection, Node
from graftlm.core.grammar.spec import Limits

if TYPE_CHECKING:
    import numpy.typing as npt

MAX_STATES = 20_000
# A byte that UTF-8 never uses: added as a text of its own, it keeps the automaton of an empty language buildable.
_NEVER = 0xFF
_SLICE = 500_000
"""Pairs times classes of bytes between two looks at the clock: half a second at most, as Python."""
_LEAVES = frozenset({nodes.Literal, nodes.CharSet, nodes.Empty, nodes.Automaton, nodes.Rule})
"""Kinds of nodes without a product in them."""


@lru_cache(maxsize=512)
def product(node: Node) -> Automaton:
    """The automaton of `node`, a product without dead ends. Raises GrammarError over MAX_STATES states."""
    return _as_automaton(table(node))


def without_counters(node: Node) -> Automaton | None:
    """The automaton of `node`, None where that counts repeats. Raises GrammarError over MAX_STATES states."""
    dfa = Dfa.compile(_with_never(node), Limits(states=MAX_STATES))
    return None if dfa.loops else _as_automaton(_without_never(dfa))


def without_products(node: Node) -> Node:
    """Return `node` with every intersection and difference in it replaced by its automaton."""
    return _without_products(node, {}) if _has_products(node) else node


def _has_products(node: Node) -> bool:
    """Whether there is an intersection or a difference in `node`."""
    work, seen = [node], set[int]()
    while work:
        here = work.pop()
        if type(here) in _LEAVES or id(here) in seen:
            continue
        seen.add(id(here))
        match here:
            case nodes.Concat(items) | nodes.Alternation(items):
                work += items
            case nodes.Repeat(item):
                work.append(item)
            case nodes.Graph(rows):
                work += [item for row in rows for item, _ in row]
            case _:
                return True
    return False


def _without_products(node: Node, done: dict[int, Node]) -> Node:
    """`done` is by id: shared nodes are visited once and stay shared."""
    found = done.get(id(node))
    if found is None:
        if isinstance(node, (Intersection, Difference)):
            found = product(node)
        else:
            found = nodes.map_children(lambda child: _without_products(child, done), node)
        done[id(node)] = found
    return found


@lru_cache(maxsize=2048)
def is_empty(node: Node) -> bool:
    """Whether no text matches `node`."""
    match node:
        case Intersection((*items, last)):
            first = _both_of(items)
            return not _Walk(first, table(last), keep_if_second=True, stops=True).run()
        case Difference(item, minus):
            return not _Walk(table(item), table(minus), keep_if_second=False, stops=True).run()
    return not table(node).live()[1]


def has_length(node: Node, low: int, high: int | None) -> bool:
    """Whether some text of `low` to `high` characters matches `node`; None is without bound."""
    found = table(node)
    live = found.live()
    states = np.array([1] if live[1] else [], np.int32)
    length = 0
    while len(states) and (high is None or length <= high):
        check()
        if length >= low and (high is None or found.accepting[states].any()):
            return True
        states, length = _after_character(found, live, states), length + 1
    return False


def _after_character(table: ByteTable, live: npt.NDArray[np.bool_], states: Int32Array) -> Int32Array:
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
    """Whether `node` matches the whole of `text`, by its automaton, which is kept."""
    try:
        data = text.encode()
    except UnicodeEncodeError:
        return False
    return table(node).accepts(data)


@lru_cache(maxsize=128)
def table(node: Node) -> ByteTable:
    """The table of `node`; products have no dead ends in it. Raises GrammarError over MAX_STATES states."""
    match node:
        case Automaton():
            return _expand(node)
        case Intersection(items):
            return _both_of(items)
        case Difference(item, minus):
            return _combine(table(item), table(minus), keep_if_second=False)
    return _without_never(Dfa.compile(_with_never(node), Limits(states=MAX_STATES), counters=False))


def _with_never(node: Node) -> Node:
    return nodes.alternation(nodes.Literal(bytes([_NEVER])), without_products(node))


def _without_never(dfa: Dfa) -> ByteTable:
    targets = dfa.table.copy()
    targets[:, dfa.classes[_NEVER]] = 0  # no other byte is in its class
    return ByteTable(dfa.classes.astype(np.int64), targets, dfa.accepting)


def _expand(node: Automaton) -> ByteTable:
    source, target, low, high = node.edges.T
    starts = np.unique(np.concatenate([[0, 256], low, high + 1]))
    first, last = np.searchsorted(starts, low), np.searchsorted(starts, high + 1)
    widths = last - first
    along = np.arange(widths.sum()) - np.repeat(np.cumsum(widths) - widths, widths)  # of each edge its classes
    targets = np.zeros((node.num_states + 1, len(starts) - 1), np.int32)
    targets[np.repeat(source + 1, widths), np.repeat(first, widths) + along] = np.repeat(target + 1, widths)
    accepting = np.zeros(node.num_states + 1, bool)
    accepting[node.ends + 1] = True
    return ByteTable(np.repeat(np.arange(len(starts) - 1), np.diff(starts)), targets, accepting)


def _both_of(items: Sequence[Node]) -> ByteTable:
    return reduce(partial(_combine, keep_if_second=True), map(table, items))


def _combine(a: ByteTable, second: ByteTable, *, keep_if_second: bool) -> ByteTable:
    """Walk both at once; without `keep_if_second` accept what `second` does not."""
    walk = _Walk(a, second, keep_if_second=keep_if_second)
    walk.run()
    return walk.table().trimmed()


class _Walk:
    """Two tables walked at once, as far as pairs of their states are reached."""

    def __init__(self, a: ByteTable, second: ByteTable, *, keep_if_second: bool, stops: bool = False) -> None:
        self._a, self._second, self._is_both, self._stops = a, second, keep_if_second, stops
        num_classes = second.targets.shape[1]
        pairs_of_classes = (a.classes * num_classes + second.classes).tolist()
        joint = {pair: i for i, pair in enumerate(dict.fromkeys(pairs_of_classes))}
        self._classes = np.array([joint[pair] for pair in pairs_of_classes])
        self._in_a, self._in_second = np.divmod(np.array(list(joint)), num_classes)
        self._pairs = np.zeros((512, 2), np.int32)
        self._pairs[1] = 1  # both at their start
        self._rows = np.zeros((512, len(joint)), np.int32)
        self._control = np.array([2, 1], np.int64)

    def run(self) -> bool:
        """Number all pairs; with `stops` end early, with True, where a text may end."""
        a, second, control = self._a, self._second, self._control
        slots = np.zeros(1 << (4 * MAX_STATES).bit_length(), np.int32)
        budget = max(1, _SLICE // len(self._in_a))
        while True:
            status = pairs.walk(
                a.targets, second.targets, self._in_a, self._in_second, a.accepting, second.accepting,
                self._is_both, self._stops, self._pairs, self._rows, slots, control, budget,
            )  # fmt: skip
            if control[pairs.NUM_PAIRS] - 1 > MAX_STATES:
                raise GrammarError(
                    f"combining two patterns or lengths needs more than {MAX_STATES:,} states; use one of them alone"
                )
            if status in (pairs.DONE, pairs.FOUND):
                return bool(status == pairs.FOUND)
            check(self._rows.nbytes)
            if status == pairs.GROW:
                self._pairs, self._rows = _doubled(self._pairs), _doubled(self._rows)

    def table(self) -> ByteTable:
        num_pairs = int(self._control[pairs.NUM_PAIRS])
        in_a, in_second = self._pairs[:num_pairs].T
        accepted = self._second.accepting[in_second]
        accepting = self._a.accepting[in_a] & (accepted if self._is_both else ~accepted)
        accepting[0] = False
        return ByteTable(self._classes, self._rows[:num_pairs].copy(), accepting)


def _doubled(array: Int32Array) -> Int32Array:
    larger = np.zeros((2 * len(array), array.shape[1]), np.int32)
    larger[: len(array)] = array
    return larger


def _as_automaton(table: ByteTable) -> Automaton:
    # neighbours in one class have one target: a run begins where the class of the byte does
    begins = np.flatnonzero(np.diff(table.classes, prepend=-1))
    targets = table.targets[1:][:, table.classes[begins]]
    cuts = np.concatenate([np.ones((len(targets), 1), bool), targets[:, 1:] != targets[:, :-1]], axis=1)
    states, columns = np.nonzero(cuts)
    lows = begins[columns]
    # a run ends where the next one begins, the last one of a state with the bytes
    highs = np.where(np.append(states[1:] != states[:-1], True), 256, np.append(lows[1:], 256)) - 1
    after = targets[states, columns]
    kept = after != 0
    edges = np.stack([states[kept], after[kept] - 1, lows[kept], highs[kept]], axis=1).astype(np.int32)
    return Automaton(len(targets), edges, (np.flatnonzero(table.accepting) - 1).astype(np.int32))
