"""Small automata as regular expressions: a terminal holds one, where rules would have llguidance parse each byte."""

from __future__ import annotations

from graftlm.core.grammar import ast
from graftlm.core.grammar.ast import Node

MAX_ROWS = 160
"""States of an automaton that is looked at."""
MAX_STATES = 16
"""The same once those that go on alike are one."""
MAX_PARTS = 200
"""Nodes of the expression, or of a part of it on the way there."""

_Rows = tuple[tuple[tuple[int, int, int], ...], ...]
_Edge = tuple[Node, int]
"""What leads from one state to another, and of how many nodes it is."""


def short_regex(automaton: ast.Automaton) -> Node | None:
    """The texts of an automaton without automata, None where that takes more parts or goes beyond ASCII.

    States are left out one after the other: what led through one becomes an edge from the one before to the one after.
    """
    rows = automaton.rows
    if len(rows) > MAX_ROWS or any([high > 0x7F for row in rows for _, high, _ in row]):
        return None
    rows, accepting = _merged(_living(automaton), automaton.accepting)
    if len(rows) > MAX_STATES:
        return None
    start, end = len(rows), len(rows) + 1
    edges = _Edges(end + 1)
    edges.add(start, 0, ast.EMPTY, 1)
    for state, row in enumerate(rows):
        ranges: dict[int, list[ast.Range]] = {}
        for low, high, target in row:
            ranges.setdefault(target, []).append((low, high))
        for target, found in ranges.items():
            edges.add(state, target, ast.char_set(found), 1)
        if state in accepting:
            edges.add(state, end, ast.EMPTY, 1)
    left = set(range(len(rows)))
    while left:
        state = min(left, key=edges.num_ways)
        left.remove(state)
        if not edges.leave_out(state):
            return None
    return edges.rows[start].get(end, (ast.NOTHING, 1))[0]


def _living(automaton: ast.Automaton) -> _Rows:
    """The rows without edges to states from which no text ends."""
    before: list[list[int]] = [[] for _ in automaton.rows]
    for state, row in enumerate(automaton.rows):
        for _, _, target in row:
            before[target].append(state)
    alive, work = set(automaton.accepting), list(automaton.accepting)
    while work:
        found = [state for state in before[work.pop()] if state not in alive]
        alive.update(found)
        work += found
    return tuple([tuple([edge for edge in row if edge[2] in alive]) for row in automaton.rows])


def _merged(rows: _Rows, accepting: frozenset[int]) -> tuple[_Rows, frozenset[int]]:
    """The same automaton with one state for those that go on alike, as far as their edges show it."""
    while True:
        numbers: dict[tuple[bool, tuple[tuple[int, int, int], ...]], int] = {}
        names = [numbers.setdefault((state in accepting, row), len(numbers)) for state, row in enumerate(rows)]
        if len(numbers) == len(rows):
            return rows, accepting
        rows = tuple([tuple([(low, high, names[target]) for low, high, target in row]) for _, row in numbers])
        accepting = frozenset([state for state, (accepts, _) in enumerate(numbers) if accepts])


class _Edges:
    """What leads from each state to each other one."""

    def __init__(self, num_states: int) -> None:
        self.rows: list[dict[int, _Edge]] = [{} for _ in range(num_states)]

    def add(self, source: int, target: int, node: Node, size: int) -> int:
        """Add an edge beside those that there are. -> how many nodes that takes"""
        known = self.rows[source].get(target)
        if known is not None:
            node, size = _either(known[0], node), known[1] + size + 1
        self.rows[source][target] = node, size
        return size

    def num_ways(self, state: int) -> int:
        """How many edges would take the place of `state`."""
        return len(self.rows[state].keys() - {state}) * sum([state in row for row in self.rows])

    def leave_out(self, state: int) -> bool:
        """Lead past `state`; False where that takes too many parts."""
        row = self.rows[state]
        loop, size = row.pop(state, (ast.NOTHING, 0))
        loop = ast.star(loop)
        for source, before in enumerate(self.rows):
            into = before.pop(state, None)
            if into is not None:
                for target, (after, num_after) in row.items():
                    node = ast.concat(into[0], loop, after)
                    if self.add(source, target, node, into[1] + size + num_after) > MAX_PARTS:
                        return False
        row.clear()
        return True


def _either(one: Node, other: Node) -> Node:
    if type(one) is ast.Empty or type(other) is ast.Empty:
        node = other if type(one) is ast.Empty else one
        return node if ast.nullable(node) else ast.optional(node)
    return ast.alternation(one, other)
