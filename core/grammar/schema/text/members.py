"""Objects as a walk over their members: declared ones in order, each there or left out, then any number of others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graftlm.core.grammar.nodes import nodes
from graftlm.core.grammar.nodes.nodes import Node
from graftlm.core.grammar.schema.algebra.shapes import Shape
from graftlm.core.grammar.schema.text.branches import Formula, Walk
from graftlm.core.grammar.schema.text.member_ways import Key, Kind, MemberWays, State

if TYPE_CHECKING:
    from graftlm.core.grammar.schema.lowering import Lowering


def ways_of(lowering: Lowering, formula: Formula) -> MemberWays:
    """What may follow in such objects; known where the schema was lowered before."""
    known = lowering.algebra.member_ways
    if formula not in known:
        known[formula] = MemberWays(lowering.algebra, formula, lowering.pointers, names_differ=lowering.names_differ)
    return known[formula]


class Members:
    """The text between the braces of an object for which `formula`, whose leaves are Objects, holds."""

    def __init__(self, lowering: Lowering, formula: Formula) -> None:
        self._lowering = lowering
        self._ways = ways_of(lowering, formula)
        self._walk = Walk(lowering.tokens.comma)
        self._places: dict[tuple[State, bool], int] = {}
        self._work: list[tuple[State, bool, int]] = []
        self._written: dict[State, list[int]] = {}  # ways that begin in a state
        self._keys: dict[Kind, Node] = {}

    def node(self) -> Node:
        self._place(self._ways.start, False)
        while self._work:
            self._steps(*self._work.pop())
        return self._walk.node()

    def _place(self, state: State, written: bool) -> int:
        """The number of a place; a new one will be left in turn."""
        key = (state, written)
        found = self._places.get(key)
        if found is None:
            found = self._places[key] = self._walk.place()
            self._work.append((state, written, found))
        return found

    def _steps(self, state: State, written: bool, here: int) -> None:
        ways = self._ways.of(state)
        if ways.ends:
            self._walk.accept(here)
        if ways.absent is not None:
            self._walk.skip(here, self._place(ways.absent, written))
        present = self._written.get(state)
        if present is None:  # they are the same whether or not something was written
            members = self._members(ways.present)
            present = self._written[state] = [
                self._walk.way(node, self._place(target, True)) for node, target in members
            ]
        for way in present:
            self._walk.write(here, written, way)

    def _members(self, ways: list[tuple[Key, Shape, State]]) -> list[tuple[Node, State]]:
        found = []
        for key, shape, target in ways:
            name, value = self._key(key), self._lowering.value(shape)
            if not nodes.is_nothing(value):
                found.append((nodes.concat(name, value), target))
        return found

    def _key(self, key: Key) -> Node:
        """The name of a member and the colon."""
        if isinstance(key, str):
            return self._lowering.tokens.name(key)
        if key not in self._keys:
            name = self._ways.name(*key)
            tokens = self._lowering.tokens
            self._keys[key] = tokens.key(tokens.other_names(self._ways.names) if name is None else name)
        return self._keys[key]
