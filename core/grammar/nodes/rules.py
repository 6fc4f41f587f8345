"""Rules written out where nodes name them: a language in which no rule contains itself is regular."""

from __future__ import annotations

from collections.abc import Mapping

from graftlm.core.grammar.budget import check
from graftlm.core.grammar.nodes import nodes
from graftlm.core.grammar.nodes.nodes import Node
from graftlm.core.grammar.nodes.sizes import NodeSizes, survey

MAX_NODES = 50_000
"""Nodes of a language that is written out; shared ones count at each occurrence."""


class Substitution:
    """Nodes with others in place of some rules; shared nodes stay shared.

    rules  by name, the nodes that replace them
    """

    def __init__(self, rules: dict[str, Node]) -> None:
        self.rules = rules
        self._found: dict[int, tuple[Node, Node]] = {}  # by id, with the node so that the id stays its own

    def __call__(self, node: Node) -> Node:
        """Return `node` with the replacements, simplified again."""
        if isinstance(node, nodes.Rule):
            return self.rules.get(node.name, node)
        if not isinstance(node, nodes.Concat | nodes.Alternation | nodes.Repeat | nodes.Graph):
            return node
        if id(node) not in self._found:
            check()
            self._found[id(node)] = node, self._composed(node)
        return self._found[id(node)][1]

    def _composed(self, node: nodes.Concat | nodes.Alternation | nodes.Repeat | nodes.Graph) -> Node:
        match node:
            case nodes.Concat(items):
                return nodes.concat(*map(self, items))
            case nodes.Alternation(items):
                return nodes.alternation(*(item for item in map(self, items) if not nodes.is_nothing(item)))
            case nodes.Repeat(item, least, most):
                return nodes.repeat(self(item), least, most)
            case nodes.Graph(rows, accepting):
                return nodes.graph([[(self(item), to) for item, to in row] for row in rows], accepting)


def written_out(node: Node, rules: Mapping[str, Node]) -> Node | None:
    """Return `node` without rules; None if a rule contains itself, or if the result would exceed MAX_NODES."""
    order = _innermost_first(node, rules)
    if order is None:
        return None
    size_of, sizes = NodeSizes(), dict[str, int]()
    for name, body in [*((name, rules[name]) for name in order), ("", node)]:
        sizes[name] = size_of(body) + sum([sizes[inner] for inner in survey(body).rules])
        if sizes[name] > MAX_NODES:
            return None
    written = Substitution({})
    for name in order:
        written.rules[name] = written(rules[name])
    return written(node)


def _innermost_first(node: Node, rules: Mapping[str, Node]) -> list[str] | None:
    """Return the rules that `node` names, each after those in it; None if one contains itself or is unknown."""
    order, is_open = list[str](), {}
    work = [("", list(survey(node).inner))]
    while work:
        name, left = work[-1]
        if not left:
            work.pop()
            if name:
                is_open[name] = False
                order.append(name)
            continue
        below = left.pop()
        if below not in is_open:
            if below not in rules:
                return None
            is_open[below] = True
            work.append((below, list(survey(rules[below]).inner)))
        elif is_open[below]:
            return None
    return order
