"""Arrays as a walk over their items, which counts those that `contains` asks for."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.nodes import nodes
from graftlm.core.grammar.nodes.nodes import Node
from graftlm.core.grammar.schema.algebra.shapes import ANYTHING, NOTHING, Array, Shape, both, item_at
from graftlm.core.grammar.schema.text.branches import (
    MAX_PLACES,
    Formula,
    Question,
    Walk,
    accepts,
    branch,
    decide,
    leaf_set,
    leaves,
)

if TYPE_CHECKING:
    from graftlm.core.grammar.schema.lowering import Lowering

State = tuple[int, Formula, tuple[int, ...]]
"""How many items there are (as far as it matters), what is left to hold, how many items each `contains` has met."""

_Item = tuple[Node, Formula, tuple[int, ...]]
"""What an item may be, what that leaves to hold, and which counts go up."""

_FEW_CASES = 4
_FEW_ITEMS = 16


class Items:
    """The text between the brackets of an array for which `formula`, whose leaves are Arrays, holds."""

    def __init__(self, lowering: Lowering, formula: Formula) -> None:
        self._lowering = lowering
        self._formula = formula
        self._walk = Walk(lowering.tokens.comma)
        self._places: dict[State, int] = {}
        self._work: list[tuple[State, int]] = []
        self._arrays = [leaf for leaf in leaves(formula) if isinstance(leaf, Array)]
        self._wanted = [(leaf, wanted) for leaf in self._arrays for wanted in leaf.contains]
        self._enough = [_enough(wanted.least, wanted.most) for _, wanted in self._wanted]
        self._bounded = [
            (i, leaf, wanted.most) for i, (leaf, wanted) in enumerate(self._wanted) if wanted.most is not None
        ]
        self._counted: dict[Shape, list[tuple[int, int, int | None]]] = {leaf: [] for leaf in self._arrays}
        for i, (leaf, wanted) in enumerate(self._wanted):
            self._counted[leaf].append((i, wanted.least, wanted.most))
        self._growing = [leaf for leaf in self._arrays if _keeps_holding(leaf)]
        self._longest = max(len(leaf.prefix) for leaf in self._arrays)
        self._highs = sorted({leaf.max_items for leaf in self._arrays if leaf.max_items is not None})
        self._items: dict[tuple[tuple[int, int], Formula, tuple[int, ...]], list[_Item]] = {}
        self._last = max(
            max(len(leaf.prefix), leaf.min_items, 0 if leaf.max_items is None else leaf.max_items + 1)
            for leaf in self._arrays
        )
        if self._last > MAX_PLACES:
            raise GrammarError(
                f"bounds of {self._last - 1:,} items beside 'contains' or 'not' cannot be kept, the limit is "
                f"{MAX_PLACES:,}; lower them"
            )

    def node(self) -> Node:
        start: State = (0, self._formula, (0,) * len(self._wanted))
        self._place(start)
        while self._work:
            self._steps(*self._work.pop())
        return self._walk.node()

    def _place(self, state: State) -> int:
        """The number of a place; a new one will be left in turn."""
        found = self._places.get(state)
        if found is None:
            found = self._places[state] = self._walk.place()
            self._work.append((state, found))
        return found

    def _steps(self, state: State, here: int) -> None:
        position, formula, counts = state
        if accepts(formula, lambda leaf, holds: self._holds(leaf, position, counts) == holds):
            self._walk.accept(here)
        asking = tuple([i for i, enough in enumerate(self._enough) if counts[i] < enough])
        for node, after, ups in self._items_at(position, formula, asking):
            grown = tuple([count + ups.count(k) for k, count in enumerate(counts)]) if ups else counts
            target = self._next(position + 1, after, grown)
            self._walk.write(here, position > 0, self._walk.way(node, self._place(target)))

    def _items_at(self, position: int, formula: Formula, asking: tuple[int, ...]) -> list[_Item]:
        """What may come next where only `asking` still count: the same after many items, and for many counts."""
        key = ((min(position, self._longest), bisect_right(self._highs, position)), formula, asking)
        found = self._items.get(key)
        if found is None:
            found = self._items[key] = self._look_at_items(position, formula, asking)
        return found

    def _look_at_items(self, position: int, formula: Formula, asking: tuple[int, ...]) -> list[_Item]:
        questions: dict[Shape, tuple[list[Shape], list[int]]] = {}
        for leaf in leaves(formula):
            assert isinstance(leaf, Array)
            full = leaf.max_items is not None and position >= leaf.max_items
            item = NOTHING if full else item_at(leaf, position)
            if item == NOTHING:
                formula = decide(formula, frozenset({leaf}), False)
            elif item != ANYTHING:
                questions.setdefault(item, ([], []))[0].append(leaf)
        alive = leaf_set(formula)
        for i in asking:
            leaf, wanted = self._wanted[i]
            if leaf in alive:
                questions.setdefault(wanted.shape, ([], []))[1].append(i)
        asked = [Question(shape, frozenset(fails), tuple(ups)) for shape, (fails, ups) in questions.items()]
        found = []
        for value, (after, ups) in branch(formula, asked, self._lowering.algebra.reduced):
            node = self._lowering.value(value)
            if node != nodes.NOTHING:
                found.append((node, after, ups))
        return found

    def _next(self, position: int, formula: Formula, counts: tuple[int, ...]) -> State:
        """A state in which nothing is told apart that makes no difference any more."""
        for i, leaf, most in self._bounded:
            if counts[i] > most:
                formula = decide(formula, frozenset({leaf}), False)
        settled = frozenset([leaf for leaf in self._growing if self._holds(leaf, position, counts)])
        if settled:  # an array that is known to hold takes no more states, nor do its alternatives
            formula = decide(formula, settled, True)
        alive = leaf_set(formula)
        kept = tuple([count if leaf in alive else 0 for count, (leaf, _) in zip(counts, self._wanted, strict=True)])
        return min(position, max(self._last, 1)), formula, kept

    def _holds(self, leaf: Shape, position: int, counts: tuple[int, ...]) -> bool:
        assert isinstance(leaf, Array)
        if position < leaf.min_items or (leaf.max_items is not None and position > leaf.max_items):
            return False
        return all(
            [counts[i] >= least and (most is None or counts[i] <= most) for i, least, most in self._counted[leaf]]
        )


def _keeps_holding(leaf: Array) -> bool:
    """Whether an array that has the shape has it as well with more items."""
    return (leaf.items, leaf.prefix, leaf.max_items, leaf.unique) == (ANYTHING, (), None, False) and all(
        [wanted.most is None for wanted in leaf.contains]
    )


def is_one_walk(formula: Formula, num_cases: int) -> bool:
    """Whether one walk over the items is smaller than one for each case: they would count the same items again.

    Bounds, which a case without `contains` keeps by a counted repeat, are states of the walk, and have to be few.
    """
    arrays = [leaf for leaf in leaves(formula) if isinstance(leaf, Array)]
    bounds = [max(len(leaf.prefix), leaf.min_items, leaf.max_items or 0) for leaf in arrays]
    return num_cases > _FEW_CASES and max(bounds, default=0) <= _FEW_ITEMS and any([leaf.contains for leaf in arrays])


def _enough(least: int, most: int | None) -> int:
    """From here on more matches change nothing."""
    return least if most is None else most + 1


def merged(parts: list[Array]) -> Array:
    """The arrays that have all these shapes."""
    if len(parts) == 1:
        return parts[0]
    length = max(len(part.prefix) for part in parts)
    highs = [part.max_items for part in parts if part.max_items is not None]
    return Array(
        prefix=tuple(both(*(item_at(part, i) for part in parts)) for i in range(length)),
        items=both(*(part.items for part in parts)),
        min_items=max(part.min_items for part in parts),
        max_items=min(highs, default=None),
        contains=tuple(dict.fromkeys(wanted for part in parts for wanted in part.contains)),
        unique=any(part.unique for part in parts),
    )
