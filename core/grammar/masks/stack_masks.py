"""The token masks of one pushdown automaton over one vocabulary."""

from __future__ import annotations

from graftlm.core.grammar.automata.dfa import Place
from graftlm.core.grammar.automata.stack.dpda import Dpda
from graftlm.core.grammar.masks.rows.mask_rows import MaskRows
from graftlm.core.grammar.masks.rows.packed_row import PackedRow, empty_row
from graftlm.core.grammar.masks.walks.stack_walk import allow_leaving, allow_tokens
from graftlm.core.grammar.vocabulary import Vocabulary


class StackMasks(MaskRows):
    """The rows of a pushdown automaton. A mask mostly depends on the state alone, and seldom on the whole stack.

    Rows are kept by what they depend on: the first numbers of a place, or all of them and a 0, which is no state, where
    it matters that there are no others.
    """

    def __init__(self, dpda: Dpda, vocabulary: Vocabulary, max_bytes: int = 64 << 20) -> None:
        self._dpda = dpda
        super().__init__(dpda, vocabulary, max_bytes)

    def representative(self, place: Place) -> Place:
        return place

    def _known(self, place: Place) -> PackedRow | None:
        for depth in range(1, len(place) + 2):
            digest = self._digests.get(place[:depth] if depth <= len(place) else (*place, 0))
            if digest is not None:
                return self._rows.get(digest)
        return None

    def _compute(self, place: Place) -> PackedRow:
        dpda, vocabulary = self._dpda, self._vocabulary
        row = empty_row(vocabulary.num_words)
        loop = self._self_loop(place[0])
        inside = None if loop is None else vocabulary.slices.get(loop.chars, loop.exits)
        if loop is None or inside is None:
            base = vocabulary.no_tokens
            digest, depth = allow_tokens(vocabulary.trie, dpda, place, row)
        else:
            base = inside.row(loop.room)
            if loop.exits is None:
                digest, depth = allow_tokens(inside.others, dpda, place, row)
            else:
                digest, depth = allow_leaving(inside.leaving(loop.exits), dpda, place, row)
            digest ^= hash((loop.chars, loop.room))
        num_ended = 0
        while num_ended < len(place) and dpda.accepting[place[num_ended]]:
            num_ended += 1
        depth = max(depth, num_ended + 1)
        key = place[:depth] if depth <= len(place) else (*place, 0)
        return self._keep(key, digest, row, base, num_ended == len(place))
