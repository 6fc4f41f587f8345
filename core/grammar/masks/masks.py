"""The token masks of one automaton, a DFA or a pushdown automaton, over one vocabulary."""

from __future__ import annotations

from graftlm.core.grammar.automata.dfa import Dfa, Place
from graftlm.core.grammar.automata.stack.dpda import Dpda
from graftlm.core.grammar.masks import stack_walk, trie_walk
from graftlm.core.grammar.masks.mask_rows import MaskRows
from graftlm.core.grammar.masks.packed_row import PackedRow, empty_row
from graftlm.core.grammar.masks.self_loops import SelfLoop
from graftlm.core.grammar.masks.spelling import Spelling
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
                digest = trie_walk.allow_tokens(vocabulary.trie, dfa, place, row)
            else:
                digest = trie_walk.allow_tokens(vocabulary.trie, dfa, place, row, self._spelling.reachable)
        else:
            room = loop.room
            if loop.register is not None and loop.maximum >= 0:
                room = loop.maximum - place[1 + loop.register]
            base = inside.row(room)
            digest = hash((loop.chars, room))
            if loop.exits is None:
                digest ^= trie_walk.allow_tokens(inside.others, dfa, place, row)
            else:
                digest ^= trie_walk.allow_leaving(inside.leaving(loop.exits), dfa, place, row)
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
            digest, depth = stack_walk.allow_tokens(vocabulary.trie, dpda, place, row)
        else:
            base = inside.row(loop.room)
            if loop.exits is None:
                digest, depth = stack_walk.allow_tokens(inside.others, dpda, place, row)
            else:
                digest, depth = stack_walk.allow_leaving(inside.leaving(loop.exits), dpda, place, row)
            digest ^= hash((loop.chars, loop.room))
        num_ended = 0
        while num_ended < len(place) and dpda.accepting[place[num_ended]]:
            num_ended += 1
        depth = max(depth, num_ended + 1)
        key = place[:depth] if depth <= len(place) else (*place, 0)
        return self._keep(key, digest, row, base, num_ended == len(place))
