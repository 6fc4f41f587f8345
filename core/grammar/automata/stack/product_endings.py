"""The shortest ending of a product of languages: none is shorter than that of one of its parts alone.

Where the shortest ending of one part is one of the others as well, it is found without a search; else, from the start,
by an automaton over arrays, and from inside by A*.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.automata.products.product import table
from graftlm.core.grammar.automata.stack.positions import END, INFINITE, Product, Rest
from graftlm.core.grammar.budget import check

_Link = tuple[int, int]


class ProductEndings:
    """Endings from the states of `product`.

    left  bytes of the shortest way through one of its Rests
    text  that way
    """

    def __init__(self, product: Product, left: Callable[[Rest], int], text: Callable[[Rest], bytes]) -> None:
        self._product = product
        self._left = left
        self._text = text
        self._endings: dict[int, bytes | None] = {}

    def of(self, state: int) -> bytes | None:
        """The fewest bytes to an accepting state; None if there is no way."""
        if state not in self._endings:
            text = self._of_one_part(state)
            if text is None and state == 0:
                text = self._of_automaton()
            if text is None:
                self._search(state)
            else:
                self._endings[state] = text
        return self._endings[state]

    def _of_one_part(self, state: int) -> bytes | None:
        """The ending of the part that needs most, where all the others let it pass."""
        nearest = [min((self._left(rest), rest) for rest in rests) for rests in self._product.kept(state) if rests]
        num_bytes, rest = max(nearest, default=(INFINITE, END))
        if num_bytes >= INFINITE or len(nearest) < len(self._product.kept(state)):
            return None
        part = nearest.index((num_bytes, rest))
        text = self._text(rest)
        return text if self._product.passes(state, text, part) else None

    def _of_automaton(self) -> bytes | None:
        """The shortest text of all; None where there is none, or the automaton takes too many states."""
        try:
            return table(self._product.node).shortest()
        except GrammarError:
            check()
            return None

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
