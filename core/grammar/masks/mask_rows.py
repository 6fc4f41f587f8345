"""Mask rows by place: computed at first use or ahead of it, then kept."""

from __future__ import annotations

import os
import threading
import weakref
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np

from graftlm.core.grammar.automata.dfa import Dfa, Place
from graftlm.core.grammar.automata.jit import Int32Array
from graftlm.core.grammar.masks import workers
from graftlm.core.grammar.masks.packed_row import PackedRow, pack, take_back
from graftlm.core.grammar.masks.self_loops import SelfLoop, self_loop
from graftlm.core.grammar.masks.trie_walk import leads_to_many
from graftlm.core.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    from graftlm.core.grammar.automata.stack.dpda import Dpda

_SLOW_STATE = 16
"""States that allow fewer bytes have cheap masks, mostly: these are not computed ahead, and no self-loop is sought."""
_MANY_NODES = 1 << 14
"""Nodes of the trie below a state's bytes from which on its mask takes long, however few bytes it allows."""
_WIDE_STATE = 32
"""States that allow fewer bytes use a slice only where the exits of their self-loop are known: without these a walk of
the whole trie is as cheap.
"""
_MAX_PLACES = 1 << 16

_all: weakref.WeakSet[MaskRows] = weakref.WeakSet()
_NO_IDS = np.zeros(0, np.int32)


class MaskRows(ABC):
    """A mask row per place. Equal rows are kept once; beyond `max_bytes` the oldest rows are dropped.

    num_bytes  memory of the rows
    """

    def __init__(self, automaton: Dfa | Dpda, vocabulary: Vocabulary, max_bytes: int) -> None:
        self._automaton = automaton
        self._vocabulary = vocabulary
        self._max_bytes = max_bytes
        self.num_bytes = 0
        self._digests: dict[Place, int] = {}
        self._rows: dict[int, PackedRow] = {}
        self._loops: dict[int, SelfLoop | None] = {}
        self._forget_others()
        _all.add(self)

    def _forget_others(self) -> None:
        """Begin with no row under way: in a fork nobody computes those of the parent."""
        self._ahead: dict[Place, workers.Task[PackedRow]] = {}
        self._lock = threading.Lock()

    def row(self, place: Place) -> PackedRow:
        """The mask row at `place`."""
        row = self._known(place)
        if row is not None:
            return row
        key = self.representative(place)
        row = self._known(key)
        if row is None:
            ahead = self._ahead.get(key)
            row = self._compute(key) if ahead is None else ahead.result()
        digest = self._digests.get(key)
        if digest is not None:
            self._remember(place, digest)
        return row

    def prefetch(self, place: Place) -> None:
        """Compute the row at `place` on a worker thread, if it takes long and is not known.

        The walk of the trie does not hold Python's lock, so the rows of a batch are computed side by side while the
        model's forward pass runs, and one that takes long is waited for by its own sequence only.
        """
        if self._automaton.is_singular(place) or self._known(place) is not None or not self._takes_long(place[0]):
            return
        key = self.representative(place)
        if key not in self._ahead and self._known(key) is None:
            self._ahead[key] = workers.masks.submit(self._compute_ahead, key)

    def _takes_long(self, state: int) -> bool:
        """Whether the mask of a state is worth a worker: about 0.3 ms and more.

        A worker takes Python's lock four times for a mask, each time from the thread that runs the steps. Where the
        vocabulary has a slice and only what leaves it is walked, that costs more than the mask.
        """
        automaton, trie = self._automaton, self._vocabulary.trie
        if automaton.degree(state) >= _SLOW_STATE:
            loop = self._self_loop(state)
            return loop is None or loop.exits is None or not self._vocabulary.slices.has(loop.chars, loop.exits)
        table, classes, degrees = automaton.table, automaton.classes, automaton.degrees
        return bool(leads_to_many(trie.nodes, trie.roots, table, classes, degrees, state, _SLOW_STATE, _MANY_NODES))

    def _compute_ahead(self, key: Place) -> PackedRow:
        try:
            return self._compute(key)
        finally:
            self._ahead.pop(key, None)

    def _known(self, place: Place) -> PackedRow | None:
        digest = self._digests.get(place)
        return None if digest is None else self._rows.get(digest)

    @abstractmethod
    def representative(self, place: Place) -> Place:
        """A place with the same mask, the same one for as many places as is known before it is computed."""

    @abstractmethod
    def _compute(self, place: Place) -> PackedRow:
        """Compute the row at `place` and keep it."""

    def _keep(self, place: Place, digest: int, row: Int32Array, base: Int32Array, may_end: bool) -> PackedRow:
        """Keep the tokens of `row`, which `empty_row` gave, and of `base`, with the end-of-sequence ids or without.

        digest  of all but these ids
        """
        if may_end:
            digest = ~digest
        known = self._rows.get(digest)  # 64 bits over the tokens: rows with one digest are taken for equal
        if known is None:
            packed = pack(row, base, self._vocabulary.end_ids if may_end else _NO_IDS)
            with self._lock:
                known = self._rows.setdefault(digest, packed)
                if known is packed:
                    self._make_room(packed)
        else:
            take_back(row)
        self._remember(place, digest)
        return known

    def _make_room(self, new: PackedRow) -> None:
        """Count a new row, and drop the oldest others while there are too many."""
        self.num_bytes += new[-1]
        while self.num_bytes > self._max_bytes and len(self._rows) > 1:
            self.num_bytes -= self._rows.pop(next(iter(self._rows)))[-1]

    def _remember(self, place: Place, digest: int) -> None:
        if len(self._digests) >= _MAX_PLACES:
            self._digests.clear()
        self._digests[place] = digest

    def _self_loop(self, state: int) -> SelfLoop | None:
        degree = self._automaton.degree(state)
        if degree < _SLOW_STATE:
            return None
        if state not in self._loops:
            found = self_loop(self._automaton, state, self._vocabulary.trie.max_depth)
            if found is not None and found.exits is None and degree < _WIDE_STATE:
                found = None
            self._loops[state] = found
        return self._loops[state]


def _forget_all() -> None:
    for masks in list(_all):
        masks._forget_others()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
