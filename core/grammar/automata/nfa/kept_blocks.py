"""Bodies of rules that many grammars have: what an NFA has of them is kept for as long as the process runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from graftlm.core.grammar.automata.nfa.edges import Block
from graftlm.core.grammar.nodes.nodes import Node


@dataclass(frozen=True)
class KeptBlock:
    """A block in which calls of rules are left open.

    calls    places in the edges, and the rule that is called there
    written  the rules that are written out in it, with their bodies
    """

    block: Block
    calls: tuple[tuple[int, str], ...]
    written: tuple[tuple[str, Node], ...]

    @classmethod
    def of(cls, block: Block, symbols: Mapping[str, int], written: Mapping[str, Node]) -> KeptBlock:
        names = {symbol: name for name, symbol in symbols.items()}
        calls = tuple((i, names[low]) for i, low in enumerate(block.edges()[:, 2].tolist()) if low > 0xFF)
        return cls(block, calls, tuple(written.items()))

    def fits(self, symbols: Mapping[str, int], bodies: Mapping[str, Node]) -> bool:
        """Whether a grammar that calls `symbols` and writes `bodies` out has this block."""
        if not all(name in symbols and name not in bodies for _, name in self.calls):
            return False
        return all(name not in symbols and bodies.get(name) is body for name, body in self.written)

    def with_symbols(self, symbols: Mapping[str, int]) -> Block:
        block = replace(self.block, numbers=self.block.numbers.copy())
        edges = block.edges()
        for i, name in self.calls:
            edges[i, 2:] = symbols[name]
        return block


_MAX_SHARED = 128

_shared: dict[int, tuple[Node, list[KeptBlock]]] = {}  # by id, with the node, so that its id stays its own


def share(node: Node) -> None:
    """Keep what becomes of `node`, which grammars made later hold too; of the last 128 such nodes."""
    _shared.setdefault(id(node), (node, []))
    for oldest in list(_shared)[:-_MAX_SHARED]:
        _shared.pop(oldest, None)


def blocks_of(node: Node) -> list[KeptBlock] | None:
    """The blocks that are kept of a node, one for each way to call its rules; None unless it is shared."""
    found = _shared.get(id(node))
    return None if found is None else found[1]
