"""What nodes take of an automaton and which rules they name: looked at once for each body of a rule."""

from __future__ import annotations

from dataclasses import dataclass

from graftlm.core.grammar import ast
from graftlm.core.grammar.ast import ComposedNode, Node

_PLACES_OF_SET = 4
_PLACES_OF_STATE = 3
"""A state of an automaton counts as so many places, since subset construction has merged several places into it."""


@dataclass(frozen=True, slots=True)
class Survey:
    """A node without the rules that it names.

    num_places  about how many places it takes in an automaton
    rules       the rules that it names, each as often as it does
    inner       the same, each once
    ends        whether it surely derives a finite text, provided that each of these rules does
    """

    num_places: int
    rules: tuple[str, ...]
    inner: tuple[str, ...]
    ends: bool


def survey(node: Node) -> Survey:
    """The survey of `node`, which is kept with it."""
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
    """One walk over a node, which looks at shared parts once, though it counts their places each time."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self.rules: list[str] = []
        self.ends = True

    def places(self, node: Node) -> int:
        if isinstance(node, ast.Literal):
            return len(node.data)
        if isinstance(node, ast.Rule):
            self.rules.append(node.name)
            return 1
        if isinstance(node, ast.CharSet):
            if node.ranges[0][0] >= 0xD800 and node.ranges[-1][1] <= 0xDFFF:
                self.ends = False
            return _PLACES_OF_SET
        key = id(node)
        known = self._places.get(key)
        if known is not None:
            return known
        total, places = 0, self.places
        if isinstance(node, (ast.Concat, ast.Alternation, ast.Intersection)):
            for item in node.items:
                total += places(item)
            if not node.items:
                self.ends = False
        elif isinstance(node, ast.Repeat):
            total = places(node.item) * (node.min + 1 if node.max is None else node.max)
        elif isinstance(node, ast.Automaton):
            total = _PLACES_OF_STATE * node.num_states
            if node.is_nothing:
                self.ends = False
        elif isinstance(node, ast.Graph):
            for row in node.rows:
                for item, _ in row:
                    if type(item) is not ast.Empty:
                        total += places(item)
            if not _has_way(node):
                self.ends = False
        elif isinstance(node, ast.Difference):
            total = places(node.item) + places(node.minus)
        self._places[key] = total
        return total


def _has_way(node: ast.Graph) -> bool:
    """Whether a walk comes to an end, whatever its edges are."""
    seen, work = {0}, [0]
    while work and not seen & node.accepting:
        for _, target in node.rows[work.pop()]:
            if target not in seen:
                seen.add(target)
                work.append(target)
    return bool(seen & node.accepting)
