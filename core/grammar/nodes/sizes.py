"""Sizes of nodes: NFA states, rules by name, and the number of nodes below a node."""

from __future__ import annotations

from dataclasses import dataclass

from graftlm.core.grammar.nodes import nodes
from graftlm.core.grammar.nodes.nodes import ComposedNode, Node

_PLACES_OF_SET = 4
_PLACES_OF_STATE = 3
"""NFA states that one state of an automaton counts for: subset construction has merged several into it."""


@dataclass(frozen=True, slots=True)
class Survey:
    """Size and rules of a node; the bodies of the rules are not counted.

    num_places  NFA states of the node, approximately
    rules       names of the rules in the node, repeated as often as they occur
    inner       distinct names of these rules
    ends        True if the node derives a finite string, provided that each of these rules does
    """

    num_places: int
    rules: tuple[str, ...]
    inner: tuple[str, ...]
    ends: bool


def survey(node: Node) -> Survey:
    """Return the survey of `node`, cached on the node."""
    found: Survey | None = getattr(node, "_survey", None)
    if found is None:
        measure = _Measure()
        num_places = measure.places(node)
        rules = tuple(measure.rules)
        found = Survey(num_places, rules, tuple(dict.fromkeys(rules)), measure.ends)
        if isinstance(node, ComposedNode):
            object.__setattr__(node, "_survey", found)
    return found


class _Measure:
    """One traversal of a node: shared parts are visited once and counted at each occurrence."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self.rules: list[str] = []
        self.ends = True

    def places(self, node: Node) -> int:
        if isinstance(node, nodes.Literal):
            return len(node.data)
        if isinstance(node, nodes.Rule):
            self.rules.append(node.name)
            return 1
        if isinstance(node, nodes.CharSet):
            if node.ranges[0][0] >= 0xD800 and node.ranges[-1][1] <= 0xDFFF:
                self.ends = False
            return _PLACES_OF_SET
        key = id(node)
        known = self._places.get(key)
        if known is not None:
            return known
        total, places = 0, self.places
        if isinstance(node, (nodes.Concat, nodes.Alternation, nodes.Intersection)):
            for item in node.items:
                total += places(item)
            if not node.items:
                self.ends = False
        elif isinstance(node, nodes.Repeat):
            total = places(node.item) * (node.min + 1 if node.max is None else node.max)
        elif isinstance(node, nodes.Automaton):
            total = _PLACES_OF_STATE * node.num_states
            if node.is_nothing:
                self.ends = False
        elif isinstance(node, nodes.Graph):
            for row in node.rows:
                for item, _ in row:
                    if type(item) is not nodes.Empty:
                        total += places(item)
            if not _has_way(node):
                self.ends = False
        elif isinstance(node, nodes.Difference):
            total = places(node.item) + places(node.minus)
        self._places[key] = total
        return total


def _has_way(node: nodes.Graph) -> bool:
    """Return True if an accepting state is reachable, whatever the edges are."""
    seen, work = {0}, [0]
    while work and not seen & node.accepting:
        for _, target in node.rows[work.pop()]:
            if target not in seen:
                seen.add(target)
                work.append(target)
    return bool(seen & node.accepting)


_SMALLEST = frozenset({nodes.Rule, nodes.Empty, nodes.CharSet})


class NodeSizes:
    """The sizes of nodes: each node but a concatenation is counted once and cached."""

    def __init__(self) -> None:
        self._sizes: dict[int, tuple[Node, int]] = {}

    def __call__(self, node: Node) -> int:
        """Return the number of nodes below `node`; shared ones count at each occurrence."""
        if type(node) in _SMALLEST:
            return 1
        if type(node) is nodes.Concat:
            return self._of(node.items)
        if type(node) is nodes.Literal:
            return 1 + len(node.data) // 16  # `concat` has merged neighbours
        found = self._sizes.get(id(node))
        if found is None:
            size = 1
            if type(node) is nodes.Graph:
                for row in node.rows:
                    for item, _ in row:
                        size += 1 if type(item) in _SMALLEST else self(item)
            elif type(node) is nodes.Alternation:
                size = self._of(node.items)
            elif type(node) is nodes.Repeat:
                size += self(node.item)
            found = self._sizes[id(node)] = (node, size)  # holding the node keeps its id in use
        return found[1]

    def _of(self, items: tuple[Node, ...]) -> int:
        size = 1
        for item in items:
            size += 1 if type(item) in _SMALLEST else self(item)
        return size
