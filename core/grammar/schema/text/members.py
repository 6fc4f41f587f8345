"""Objects as a walk over their members: declared ones in order, each there or left out, then any number of others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graftlm.core.grammar import ast
from graftlm.core.grammar.ast import Node
from graftlm.core.grammar.schema.algebra.shapes import Shape
from graftlm.core.grammar.schema.text.branches import Formula, Walk
from graftlm.core.grammar.schema.text.member_ways import Key, Kind, MemberWays, State

if TYPE_CHECKING:
    from graftlm.core.grammar.schema.lowering import Lowering


class Members:
    """The text between the braces of an object for which `formula`, whose leaves are Objects, holds."""

    def __init__(self, lowering: Lowering, formula: Formula) -> None:
        self._lowering = lowering
        known = lowering.algebra.member_ways  # a schema may be lowered more than once
        if formula not in known:
            known[formula] = MemberWays(
                lowering.algebra, formula, lowering.pointers, names_differ=lowering.names_differ
            )
        self._ways = known[formula]
        self._walk = Walk(lowering.tokens.comma)
        self._present: dict[State, list[tuple[int, Node, State]]] = {}
        self._keys: dict[Kind, Node] = {}

    def node(self) -> Node:
        start = self._ways.start
        work = [(start, False)]
        seen = set(work)
        self._walk.place(start, False)
        while work:
            state, written = work.pop()
            for target in self._steps(state, written):
                if target not in seen:
                    seen.add(target)
                    work.append(target)
        return self._walk.node()

    def _steps(self, state: State, written: bool) -> list[tuple[State, bool]]:
        here = self._walk.place(state, written)
        ways = self._ways.of(state)
        if ways.ends:
            self._walk.accept(here)
        found = []
        if ways.absent is not None:
            self._walk.skip(here, self._walk.place(ways.absent, written))
            found.append((ways.absent, written))
        present = self._present.get(state)
        if present is None:  # they are the same whether or not something was written
            present = self._present[state] = self._members(ways.present)
        for i, node, target in present:
            self._walk.write(state, written, node, self._walk.place(target, True), i)
            found.append((target, True))
        return found

    def _members(self, ways: list[tuple[int, Key, Shape, State]]) -> list[tuple[int, Node, State]]:
        found = []
        for i, key, shape, target in ways:
            name, value = self._key(key), self._lowering.value(shape)
            if value != ast.NOTHING:
                found.append((i, ast.concat(name, value), target))
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
