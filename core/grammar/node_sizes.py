"""How large nodes are when they are written out."""

from __future__ import annotations

from graftlm.core.grammar import ast
from graftlm.core.grammar.ast import Node

_SMALLEST = frozenset({ast.Rule, ast.Empty, ast.CharSet})


class NodeSizes:
    """The sizes of nodes, each counted once but for rows of others."""

    def __init__(self) -> None:
        self._sizes: dict[int, tuple[Node, int]] = {}

    def __call__(self, node: Node) -> int:
        """How many nodes there are below `node`, shared ones counted each time."""
        if type(node) in _SMALLEST:
            return 1
        if type(node) is ast.Concat:
            return self._of(node.items)
        if type(node) is ast.Literal:
            return 1 + len(node.data) // 16  # neighbours were merged, perhaps often
        found = self._sizes.get(id(node))
        if found is None:
            size = 1
            if type(node) is ast.Graph:
                for row in node.rows:
                    for item, _ in row:
                        size += 1 if type(item) in _SMALLEST else self(item)
            elif type(node) is ast.Alternation:
                size = self._of(node.items)
            elif type(node) is ast.Repeat:
                size += self(node.item)
            found = self._sizes[id(node)] = (node, size)  # with the node, so that its id stays its own
        return found[1]

    def _of(self, items: tuple[Node, ...]) -> int:
        size = 1
        for item in items:
            size += 1 if type(item) in _SMALLEST else self(item)
        return size
