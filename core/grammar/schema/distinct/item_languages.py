"""The languages of the items of arrays, each made once: what an item at some place of an array may be."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from graftlm.core.grammar.schema.algebra.shape_algebra import ShapeAlgebra
from graftlm.core.grammar.schema.algebra.shapes import (
    Array,
    Boolean,
    Literals,
    Null,
    Number,
    Shape,
    Text,
    both,
    item_at,
    union,
)
from graftlm.core.grammar.schema.distinct.item_language import ItemLanguage
from graftlm.core.grammar.schema.spelling import one_spelling

if TYPE_CHECKING:
    from graftlm.core.grammar.ast import Node

Way: TypeAlias = tuple[Array, ...]
"""A way to be an array at some place: the arrays that it then is."""
_SCALARS = union(Null(), Boolean(), Number(), Text())


class ItemLanguages:
    """The items of arrays; `lower` gives the language of a shape, None if that is not regular."""

    def __init__(self, algebra: ShapeAlgebra, lower: Callable[[Shape], Node | None]) -> None:
        self._algebra = algebra
        self._lower = lower
        self._languages: dict[tuple[Way, int], ItemLanguage | None] = {}
        self._values: dict[tuple[Way, int], frozenset[str] | None] = {}

    def of(self, way: Way, index: int) -> ItemLanguage | None:
        """What the item at `index` may be in arrays that are all of `way`; None if there is no end of it."""
        place = _place(way, index)
        if place not in self._languages:
            shape = self._without_repeats(item_of(*place))
            node, is_whole = self._lower(shape), True
            if node is None:  # not regular for its arrays and objects, of which there is no end
                node, is_whole = self._lower(both(shape, _SCALARS)), False
            self._languages[place] = None if node is None else ItemLanguage.of(node, is_whole)
        return self._languages[place]

    def _without_repeats(self, shape: Shape) -> Shape:
        """`shape`; where it has few values, these: the language of an array has those with equal items too."""
        values = self._algebra.few_values.of(shape)
        if values and any(text[0] == "[" for text in values) and not any("{" in text for text in values):
            return Literals(tuple(sorted(values)))
        return shape

    def has(self, way: Way, index: int, text: bytes) -> bool:
        """Whether `text` may be the item at `index`."""
        language = self.of(way, index)
        return language is None or language.has(text)

    def values(self, way: Way, index: int) -> frozenset[str] | None:
        """The values that the item at `index` may have, in one spelling; None where they may be many."""
        place = _place(way, index)
        if place not in self._values:
            found = self._algebra.few_values.of(item_of(*place))
            self._values[place] = None if found is None else frozenset(one_spelling(text.encode()) for text in found)
        return self._values[place]


def item_of(way: Way, index: int) -> Shape:
    """What the item at `index` has to be in arrays that are all of `way`."""
    return both(*(item_at(shape, index) for shape in way))


def _place(way: Way, index: int) -> tuple[Way, int]:
    """`way`, and an index whose item has the shape of that at `index`: beyond all prefixes items are alike."""
    return way, min(index, max((len(shape.prefix) for shape in way), default=0))
