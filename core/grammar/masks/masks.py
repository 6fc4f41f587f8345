"""The token masks of one DFA over one vocabulary."""

from __future__ import annotations

from graftlm.core.grammar.automata.dfa import Dfa, Place
from graftlm.core.grammar.masks.rows.mask_rows import MaskRows
from graftlm.core.grammar.masks.rows.packed_row import PackedRow, empty_row
from graftlm.core.grammar.masks.spelling import Spelling
from graftlm.core.grammar.masks.walks.self_loops import SelfLoop
from graftlm.core.grammar.masks.walks.trie_walk import allow_leaving, allow_tokens
from graftlm.core.grammar.vocabulary import Vocabulary


class Masks(MaskRows):
    """The rows of a DFA; `spelling` where the vocabulary lacks tokens for single bytes."""

    def __init__(
        self, dfa: Dfa, vocabulary: Vocabulary, max_bytes: int = 64 << 20, spelling: Spelling | None = None
    ) -> None:
        self._dfa = dfa
        self._spelling = spelling
        super().__init__(dfa, vocabulary, max_bytes)

    def _compute(self, place: Place) -> PackedRow:
        dfa, vocabulary = self._dfa, self._vocabulary
        state = place[0]
        row = empty_row(vocabulary.num_words)
        loop = self._self_loop(state)
        inside = None if loop is None else vocabulary.slices.get(loop.chars, loop.exits)
        if loop is None or inside is None:
            base = vocabulary.no_tokens
            if self._spelling is None:
                digest = allow_tokens(vocabulary.trie, dfa, place, row)
            else:
                digest = allow_tokens(vocabulary.trie, dfa, place, row, self._spelling.reachable)
        else:
            room = loop.room
            if loop.register is not None and loop.maximum >= 0:
                room = loop.maximum - place[1 + loop.register]
            base = inside.row(room)
            digest = hash((loop.chars, room))
            if loop.exits is None:
                digest ^= allow_tokens(inside.others, dfa, place, row)
            else:
                digest ^= allow_leaving(inside.leaving(loop.exits), dfa, place, row)
        return self._keep(place, digest, row, base, bool(dfa.accepting[state]))

    def _self_loop(self, state: int) -> SelfLoop | None:
        return None if self._spelling is not None else super()._self_loop(state)

    def representative(self, place: Place) -> Place:
        """A place with the same mask: counts too far from a bound for any token to reach it are treated as equal."""
        if not any(place[1:]):  # a count of 0 stays 0
            return place
        reach = self._vocabulary.trie.max_depth
        counts = []
        for count, owner in zip(place[1:], self._dfa.owners_at(place[0]), strict=True):
            if owner >= 0:
                loop = self._dfa.loops[owner]
                if count + reach < loop.minimum:
                    count = 0
                elif count >= loop.minimum and (loop.maximum < 0 or count + reach < loop.maximum):
                    count = loop.minimum
            counts.append(count)
        return (place[0], *counts)
