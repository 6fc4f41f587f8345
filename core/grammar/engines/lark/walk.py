"""The rules of a walk over the states of a graph, in llguidance's dialect of Lark."""

from __future__ import annotations

from typing import Protocol

from graftlm.core.grammar import ast
from graftlm.core.grammar.ast import Node
from graftlm.core.grammar.engines.lark.words import ITSELF, is_short, pair

_MAX_BODY = 1_000
"""Characters of a rule that another takes up."""


class Rules(Protocol):
    """The rules that a grammar has so far."""

    def in_sequence(self, node: Node) -> str:
        """`node` beside others."""
        ...

    def shared(self, body: str) -> str:
        """The name of a rule of this body: one that there is already, or a new one."""
        ...

    def written(self, body: str) -> str:
        """A body beside others: as it is where it is met for the first time, the name of its rule from then on."""
        ...

    def looping(self, body: str) -> str:
        """The same of a body that names its own rule, as ITSELF."""
        ...

    def option(self, node: Node) -> str | None:
        """The name of a rule of `node` or nothing at all; None where such a node was not asked for before."""
        ...

    def is_shared(self, body: str) -> bool:
        """Whether a rule has this body."""
        ...

    def is_met(self, body: str) -> bool:
        """Whether this was asked before of the same body, or a rule has it."""
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

    A member that may be left out before the same other ones is met in many objects that say nothing of most names. From
    the second time on the member has a rule, with or without it, and states that only it lies between are one rule.
    """

    def __init__(self, graph: ast.Graph, writer: Rules) -> None:
        self._rows, self._accepting = graph.rows, graph.accepting
        self._writer = writer
        self._names: list[str | None] = [None] * len(graph.rows)
        arrivals = [0] * len(graph.rows)
        self._looping, silent = set[int](), list[int]()
        for state, row in enumerate(graph.rows):
            for item, target in row:
                arrivals[target] += 1
                if target == state:
                    self._looping.add(state)
                elif target > state and type(item) is ast.Empty:
                    silent.append(target)
        self._ways_of: dict[int, list[str]] = {}  # of states that one before them goes on to as if it were them
        self._alike = {target for target in silent if arrivals[target] == 1}
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
        for state in self._inlined:
            after = graph.rows[state][0][1]
            if any([target == state for _, target in graph.rows[after]]):
                self._looping.add(after)
        self._left_out = {  # states that a member leads from, or nothing, to the same other one, which is named
            state: row[0][1]
            for state, row in enumerate(graph.rows)
            if len(row) == 2 and 0 != row[0][1] == row[1][1] != state and type(row[0][0]) is ast.Empty
        }
        self._between = {
            target for target in self._left_out.values() if arrivals[target] == 2 and target not in self._looping
        }
        self._bodies: dict[int, str] = {}  # of states between two members, until another state's has it

    def write(self) -> str:
        """Define the rules; return the first state's name."""
        names, writer = self._names, self._writer
        for state in range(len(names) - 1, -1, -1):
            if state in self._inlined or names[state] == "":
                continue
            if names[state] is None and state in self._looping:
                names[state] = ITSELF
            option = self._option(state) if state in self._left_out else None
            ways = self._ways(state) if option is None else [option]
            if state in self._alike:
                self._ways_of[state] = ways
                continue
            body = "|".join(dict.fromkeys(ways))
            name = names[state]
            if name is None and state in self._between and len(ways) == 1 and len(body) < _MAX_BODY:
                self._bodies[state] = body
            elif name is None:
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
            name = names[target] or self._name(target)
            found.append(pair(text, name) if text and name else text or name)
        if state in self._accepting:
            found.append("")
        return found

    def _name(self, state: int) -> str:
        name = self._names[state]
        if name is None:
            body = self._bodies.pop(state, None)
            name = self._names[state] = self._writer.fresh() if body is None else self._writer.shared(body)
        return name

    def _option(self, state: int) -> str | None:
        """The way on of a state that leaves out a member or not; None where its ways are rather written apart."""
        target, writer = self._left_out[state], self._writer
        if state in self._accepting or target in self._inlined:
            return None
        item = self._rows[state][1][0]
        rest = self._bodies.get(target)
        if rest is None or writer.is_met(rest):
            rest, text = self._name(target), writer.in_sequence(item)
            if writer.is_shared(f"{rest}|{pair(text, rest)}" if rest else f"|{text}"):  # as another walk wrote it
                return None
        option = writer.option(item)
        if option is None:
            return None
        self._bodies.pop(target, None)
        return pair(option, rest) if rest else option
