"""What the native engines have in common: a byte automaton, advanced token by token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Self, TypeVar

from graftlm.core.errors import ConfigError
from graftlm.core.grammar.automata.dfa import Dfa, Place
from graftlm.core.grammar.automata.endings import EndingTooLongError
from graftlm.core.grammar.automata.stack.dpda import Dpda
from graftlm.core.grammar.masks.healing import LOOKBACK, encode_after, last_bytes, without_last
from graftlm.core.grammar.masks.mask_rows import MaskRows
from graftlm.core.grammar.masks.packed_row import write
from graftlm.core.grammar.matcher import MaskRow
from graftlm.core.grammar.vocabulary import Vocabulary

K = TypeVar("K")
V = TypeVar("V")

_MAX_REMEMBERED = 1 << 14
_MAX_DEPTH = 64
"""Numbers in the longest place of which anything is remembered."""


class AutomatonGrammar(ABC):
    """An automaton over one vocabulary, with its memoised masks, forced tokens and endings; shared by matchers and
    threads.
    """

    engine: ClassVar[str]

    def __init__(self, automaton: Dfa | Dpda, vocabulary: Vocabulary, masks: MaskRows) -> None:
        self.automaton = automaton
        self.vocabulary = vocabulary
        self.masks = masks
        self._runs: dict[Place, tuple[bytes, Place]] = {}
        self._forced: dict[tuple[Place, int], tuple[int, ...]] = {}
        self._endings: dict[Place, tuple[int, ...]] = {}
        self._too_long: dict[Place, None] = {}  # places without an ending within the limit of a search

    @property
    def num_bytes(self) -> int:
        return self.automaton.num_bytes + self.masks.num_bytes

    @abstractmethod
    def matcher(self) -> AutomatonMatcher: ...

    @abstractmethod
    def first_continued(self, suffix: bytes, place: Place) -> int:
        """Return the first index of `suffix` at which a longer token starts that can continue from `place`, or -1."""

    @abstractmethod
    def shortest_ending(self, place: Place) -> Sequence[int]:
        """The tokens of the shortest way from `place` to an end of the text."""

    def can_end(self, place: Place) -> bool:
        """Whether some tokens lead from `place` to an end of the text."""
        return True

    def ending_bound(self, place: Place) -> int:
        """At least as many tokens as `ending` has: one for each byte."""
        return self.automaton.ending_bound(place)

    def run(self, place: Place) -> tuple[bytes, Place]:
        """The forced bytes at `place`, one edge of the compressed FSM, and the place after them."""
        if not self.automaton.is_singular(place):
            return b"", place
        found = self._runs.get(place)
        if found is None:
            found = self.automaton.run(place)
            _remember(self._runs, place, place, found)
        return found

    def forced(self, place: Place, last_token: int) -> tuple[int, ...]:
        """The healed tokens of the forced bytes at `place`, after `last_token` (-1: after nothing)."""
        data, after = self.run(place)
        if not data:
            return ()
        key = (place, last_token)
        found = self._forced.get(key)
        if found is None:
            if last_token >= 0:
                found = self._forced_behind(last_token, place, data)
            if found is None:
                found = self._healed(last_token, place, data, after)
            _remember(self._forced, place, key, found)
        return found

    def _forced_behind(self, last_token: int, place: Place, data: bytes) -> tuple[int, ...] | None:
        """The healed tokens of `data`, forced at `place`, behind a token: those after nothing, but for the word
        that the token may join. None where they have to be worked out.
        """
        vocabulary = self.vocabulary
        if not vocabulary.joins(last_token, data):
            return self.forced(place, -1)
        num_joined = vocabulary.num_joined(last_token, data)
        if num_joined == len(data) or not vocabulary.has_all_bytes:
            return None
        word, ids = data[:num_joined], self.forced(place, -1)
        joined, alone = encode_after(vocabulary, (last_token,), word), vocabulary.encode(word)
        if joined == alone:
            return ids
        # what is held back lies among the last tokens, which are the same
        return (*joined, *ids[len(alone) :]) if len(ids) >= len(alone) + LOOKBACK else None

    def _healed(self, last_token: int, place: Place, data: bytes, after: Place) -> tuple[int, ...]:
        """Return the tokens of `data`, forced at `place`, without the last ones where a longer token could continue
        from `after`.
        """
        vocabulary, context = self.vocabulary, () if last_token < 0 else (last_token,)
        ids = encode_after(vocabulary, context, data)
        if not self.automaton.is_final(after):
            suffix = last_bytes(vocabulary, ids)
            start = self.first_continued(suffix, after)
            if start >= 0:
                ids = without_last(vocabulary, ids, len(suffix) - start)
        return tuple(ids)

    def ending(self, place: Place) -> tuple[int, ...]:
        """The tokens of the shortest path from `place` to an accepting state.

        Raises EndingTooLongError, at once where a search has failed before.
        """
        found = self._endings.get(place)
        if found is None:
            if place in self._too_long:
                raise EndingTooLongError("the shortest text was not found before; lower its minimums")
            try:
                found = tuple(self.shortest_ending(place))
            except EndingTooLongError:
                _remember(self._too_long, place, place, None)
                raise
            _remember(self._endings, place, place, found)
        return found


def _remember(memo: dict[K, V], place: Place, key: K, value: V) -> None:
    if len(place) > _MAX_DEPTH:  # a deep stack takes memory, and is seldom met again
        return
    if len(memo) >= _MAX_REMEMBERED:
        memo.clear()
    memo[key] = value


class AutomatonMatcher:
    """One sequence in an automaton: see `graftlm.core.grammar.matcher.Matcher`."""

    __slots__ = ("_grammar", "_history", "_place", "_stopped")

    def __init__(self, grammar: AutomatonGrammar) -> None:
        self._grammar = grammar
        self._place = grammar.automaton.start
        self._stopped = False
        self._history: list[Place] = []  # the place before each consumed token

    def fill_mask(self, row: MaskRow) -> bool:
        if self._stopped:
            row[:] = 0
        else:
            write(self._grammar.masks.row(self._place), row)
        return True

    def advance(self, token_ids: Sequence[int]) -> int:
        num_consumed = self._consume(token_ids)
        if num_consumed and not self._stopped:
            self._grammar.masks.prefetch(self._place)
        return num_consumed

    def _consume(self, token_ids: Sequence[int]) -> int:
        grammar = self._grammar
        vocabulary, automaton = grammar.vocabulary, grammar.automaton
        for num_consumed, token_id in enumerate(token_ids):
            if self._stopped or not 0 <= token_id < vocabulary.vocab_size:
                return num_consumed
            data = vocabulary.tokens[token_id]
            if data:
                after = automaton.walk(self._place, data)
                if after is None or not grammar.can_end(after):
                    return num_consumed
                self._history.append(self._place)
                self._place = after
            elif token_id in vocabulary.eos_token_ids and self.accepting:
                self._history.append(self._place)
                self._stopped = True
            else:
                return num_consumed
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        if not 0 <= num_tokens <= len(self._history):
            raise ValueError(f"cannot undo {num_tokens} tokens; {len(self._history)} were consumed")
        if num_tokens:
            self._place = self._history[-num_tokens]
            del self._history[-num_tokens:]
            self._stopped = False

    def fork(self) -> Self:
        twin = type(self)(self._grammar)
        twin._place, twin._stopped, twin._history = self._place, self._stopped, self._history.copy()
        return twin

    def forced(self, context: Sequence[int]) -> list[int]:
        if self._stopped:
            return []
        return list(self._grammar.forced(self._place, int(context[-1]) if len(context) else -1))

    def forced_bytes(self) -> bytes:
        return b"" if self._stopped else self._grammar.run(self._place)[0]

    def ending_bound(self) -> int:
        """At least as many tokens as the shortest ending takes, found without searching for it."""
        return self._grammar.ending_bound(self._place)

    def min_tokens_to_accept(self) -> int:
        try:
            return 0 if self.accepting else len(self._grammar.ending(self._place))
        except EndingTooLongError:
            return self.ending_bound()

    def ending(self, context: Sequence[int]) -> list[int]:
        if self.accepting:
            return []
        plain = self._grammar.ending(self._place)
        vocabulary = self._grammar.vocabulary
        try:
            joined = encode_after(vocabulary, context, vocabulary.decode(plain))
        except ConfigError:  # the encoder's tokens cannot spell this text, `plain` can
            return list(plain)
        return joined if len(joined) <= len(plain) else list(plain)

    @property
    def accepting(self) -> bool:
        return self._grammar.automaton.accepts(self._place)

    @property
    def finished(self) -> bool:
        return self._stopped or self._grammar.automaton.is_final(self._place)

    @property
    def place(self) -> Place:
        """The place of the text in the automaton."""
        return self._place
