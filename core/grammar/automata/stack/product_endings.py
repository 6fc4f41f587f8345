"""The shortest ending of a product of languages, by A*: none is shorter than that of one of its parts alone."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from graftlm.core.grammar.automata.stack.positions import INFINITE, Product, Rest
from graftlm.core.grammar.budget import check

_Link = tuple[int, int]


class ProductEndings:
    """Endings from the states of `product`; `left` is the number of bytes of the shortest way through a Rest of it."""

    def __init__(self, product: Product, left: Callable[[Rest], int]) -> None:
        self._product = product
        self._left = left
        self._endings: dict[int, bytes | None] = {}

    def of(self, state: int) -> bytes | None:
        """The fewest bytes to an accepting state; None if there is no way."""
        if state not in self._endings:
            self._search(state)
        return self._endings[state]

    def _search(self, start: int) -> None:
        product = self._product
        came_from: dict[int, _Link | None] = {start: None}
        written = {start: 0}
        done: set[int] = set()
        queue = [(self._at_least(start), 0, start)]
        while queue:
            check()
            bound, _, here = heapq.heappop(queue)
            if bound >= INFINITE:
                break
            if product.accepts(here):
                self._remember(came_from, here)
                return
            if here in done:
                continue
            done.add(here)
            num_bytes = written[here] + 1
            for byte in sorted(product.cuts(here)):
                after = product.step(here, byte)
                if after is not None and num_bytes < written.get(after, INFINITE):
                    came_from[after], written[after] = (here, byte), num_bytes
                    # of two that may end equally soon, first the one that is nearer to its end
                    heapq.heappush(queue, (num_bytes + self._at_least(after), -num_bytes, after))
        self._endings[start] = None

    def _at_least(self, state: int) -> int:
        """Bytes that an ending from `state` has to have."""
        return max(min(map(self._left, rests), default=INFINITE) for rests in self._product.kept(state))

    def _remember(self, came_from: dict[int, _Link | None], end: int) -> None:
        """Every state on the shortest way ends as the way does."""
        data, state = b"", end
        self._endings[state] = data
        while (link := came_from[state]) is not None:
            state, byte = link
            data = bytes([byte]) + data
            self._endings[state] = data
