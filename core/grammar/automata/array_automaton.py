"""A byte automaton given by an array of its edges; its rows are made when they are asked for, which few of them are."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

from graftlm.core.grammar.automata.jit import Int32Array
from graftlm.core.grammar.nodes.nodes import Automaton

Rows = tuple[tuple[tuple[int, int, int], ...], ...]


class ArrayAutomaton(Automaton):
    """An automaton like any other; it equals those with the same arrays, and none that was made of rows.

    edges  int32 [num_edges, 4]: source, target, lowest and highest byte, in the order of sources, then of bytes
    ends   int32 [num_ends]: the accepting states
    """

    edges: Int32Array
    ends: Int32Array

    def __init__(self, num_states: int, edges: Int32Array, ends: Int32Array) -> None:
        self.__dict__.update(_num_states=num_states, edges=edges, ends=ends)

    @property
    def num_states(self) -> int:
        found: int = self.__dict__["_num_states"]
        return found

    @property
    def num_edges(self) -> int:
        return len(self.edges)

    @property
    def is_nothing(self) -> bool:
        return not len(self.ends)

    @cached_property
    def rows(self) -> Rows:
        ways = [tuple(way) for way in self.edges[:, (2, 3, 1)].tolist()]
        cuts = np.searchsorted(self.edges[:, 0], np.arange(self.num_states + 1)).tolist()
        return tuple([tuple(ways[begin:end]) for begin, end in zip(cuts, cuts[1:], strict=False)])

    @cached_property
    def accepting(self) -> frozenset[int]:
        return frozenset(self.ends.tolist())

    @cached_property
    def _key(self) -> tuple[bytes, bytes]:
        return self.edges.tobytes(), self.ends.tobytes()

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, ArrayAutomaton) and self._key == other._key)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return ArrayAutomaton, (self.num_states, self.edges, self.ends)
