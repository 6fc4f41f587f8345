"""The rules of a walk over the states of a graph, in llguidance's dialect of Lark."""

from __future__ import annotations

from typing import Protocol

from graftlm.core.grammar import ast
from graftlm.core.grammar.ast import Node
from graftlm.core.grammar.engines.lark.words import ITSELF, is_short, pair


class Rules(Protocol):
    """The rules that a grammar has so far."""

    def in_sequence(self, node: Node) -> str:
        """`node` beside others."""
        ...

    def shared(self, body: str) -> str:
        """The name of a rule of this body: one that there is already, or a new one."""
        ...

    def looping(self, body: str) -> str:
        """The same of a body that names its own rule, as ITSELF."""
        ...

    def fresh(self) -> str:
        """A name that no rule has."""
        ...

    def define(self, name: str, *ways: str) -> None:
        """Add a rule of that name."""
        ...


class Walk:
    """The rules of a Graph, from the last state to the first: states that go on alike have one rule.

    A state with one way on has none where that way is short, or met once: it is written there. So are all ways of a
    state to which only one before it comes, without an item.
    """

    def __init__(self, graph: ast.Graph, writer: Rules) -> None:
        self._rows, self._accepting = graph.rows, graph.accepting
        self._writer = writer
        self._names: list[str | None] = [None] * len(graph.rows)
        arrivals = [0] * len(graph.rows)
        for row in graph.rows:
            for _, target in row:
                arrivals[target] += 1
        self._ways_of: dict[int, list[str]] = {}  # of states that one before them goes on to as if it were them
        self._alike = {
            target
            for state, row in enumerate(graph.rows)
            for item, target in row
            if arrivals[target] == 1 and target > state and type(item) is ast.Empty
        }
        self._items: dict[int, str] = {}  # of states with one way on: an item is written once, with its rules
        self._inlined: dict[int, str] = {}
        for state, row in enumerate(graph.rows):
            if state == 0:
                continue
            if not row and state in graph.accepting:
                self._names[state] = ""  # the walk ends, and nothing may follow
            elif len(row) == 1 and row[0][1] != state and arrivals[state] <= 2 and state not in graph.accepting:
                text = self._items[state] = self._item(row[0][0])
                if arrivals[state] == 1 or is_short(text):
                    self._inlined[state] = text
        for state in list(self._inlined):  # one that leads to another such place leaves that one its rule
            if state in self._inlined:
                self._inlined.pop(graph.rows[state][0][1], None)
        self._looping = {state for state, row in enumerate(graph.rows) for _, target in row if target == state}
        for state in self._inlined:
            after = graph.rows[state][0][1]
            if any([target == state for _, target in graph.rows[after]]):
                self._looping.add(after)

    def write(self) -> str:
        """Define the rules; return the first state's name."""
        names, writer = self._names, self._writer
        for state in range(len(names) - 1, -1, -1):
            if state in self._inlined or names[state] == "":
                continue
            if names[state] is None and state in self._looping:
                names[state] = ITSELF
            ways = self._ways(state)
            if state in self._alike:
                self._ways_of[state] = ways
                continue
            body = "|".join(dict.fromkeys(ways))
            name = names[state]
            if name is None:
                names[state] = writer.shared(body)
            elif name == ITSELF:
                names[state] = writer.looping(body)
            else:  # a later state leads back here
                writer.define(name, body)
        assert names[0] is not None
        return names[0]

    def _item(self, item: Node) -> str:
        return "" if type(item) is ast.Empty else self._writer.in_sequence(item)

    def _ways(self, state: int) -> list[str]:
        names, inlined, only, found = self._names, self._inlined, self._items.get(state), list[str]()
        for item, target in self._rows[state]:
            if target in self._ways_of:
                found = [*self._ways_of.pop(target), *found] if found else self._ways_of.pop(target)
                continue
            text = "" if type(item) is ast.Empty else only or self._writer.in_sequence(item)
            more = inlined.get(target)
            if more:
                target = self._rows[target][0][1]
                text = pair(text, more) if text else more
            name = names[target]
            if name is None:
                name = names[target] = self._writer.fresh()
            found.append(pair(text, name) if text and name else text or name or '""')
        if state in self._accepting:
            found.append('""')
        return found
