"""The native grammar engine: a byte-level DFA, advanced token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from graftlm.core.errors import ConfigError, GrammarError
from graftlm.core.grammar.ast import Node
from graftlm.core.grammar.automata.dfa import Dfa, Place
from graftlm.core.grammar.automata.endings import EndingTooLongError, shortest_ending
from graftlm.core.grammar.automata.product import without_products
from graftlm.core.grammar.masks.healing import encode_after, heal
from graftlm.core.grammar.masks.masks import Masks
from graftlm.core.grammar.masks.spelling import Spelling, is_complete
from graftlm.core.grammar.matcher import MaskRow
from graftlm.core.grammar.spec import Limits
from graftlm.core.grammar.vocabulary import Vocabulary

K = TypeVar("K")
V = TypeVar("V")

_MAX_REMEMBERED = 1 << 14


class FsmGrammar:
    """A DFA over one vocabulary, with its memoised masks, forced tokens and endings; shared by matchers and threads."""

    engine = "fsm"

    def __init__(self, dfa: Dfa, vocabulary: Vocabulary, *, max_mask_bytes: int = 64 << 20) -> None:
        """Use `dfa` as it is; without a token for every byte, it must be one without counters.

        Raises GrammarError when the vocabulary cannot spell any text of the language.
        """
        self.dfa = dfa
        self.vocabulary = vocabulary
        self._spelling = None if is_complete(dfa, vocabulary) else Spelling.of(_without_counters(dfa), vocabulary)
        self.masks = Masks(dfa, vocabulary, max_mask_bytes, self._spelling)
        self._runs: dict[Place, tuple[bytes, Place]] = {}
        self._forced: dict[tuple[Place, int], tuple[int, ...]] = {}
        self._endings: dict[Place, tuple[int, ...]] = {}

    @classmethod
    def compile(cls, node: Node, vocabulary: Vocabulary, limits: Limits | None = None) -> FsmGrammar:
        """Compile `node`. Raises GrammarError when nothing matches, or not within `limits`, or cannot be spelled."""
        node = without_products(node, (limits or Limits()).states)
        dfa = Dfa.compile(node, limits)
        if dfa.loops and not is_complete(dfa, vocabulary):
            dfa = Dfa.compile(node, limits, counters=False)
        return cls(dfa, vocabulary)

    @property
    def num_bytes(self) -> int:
        return self.dfa.num_bytes + self.masks.num_bytes

    def matcher(self) -> FsmMatcher:
        return FsmMatcher(self)

    def can_end(self, place: Place) -> bool:
        """Whether some tokens lead from `place` to an accepting state."""
        return self._spelling is None or bool(self._spelling.reachable[place[0]])

    def run(self, place: Place) -> tuple[bytes, Place]:
        """The forced bytes at `place`, one edge of the compressed FSM, and the place after them."""
        found = self._runs.get(place)
        if found is None:
            found = self.dfa.run(place)
            _remember(self._runs, place, found)
        return found

    def forced(self, place: Place, last_token: int) -> tuple[int, ...]:
        """The healed tokens of the forced bytes at `place`, after `last_token` (-1: after nothing)."""
        data, after = self.run(place)
        if not data:
            return ()
        key = (place, last_token)
        found = self._forced.get(key)
        if found is None:
            found = self._healed(place, last_token, data, after)
            _remember(self._forced, key, found)
        return found

    def _healed(self, place: Place, last_token: int, data: bytes, after: Place) -> tuple[int, ...]:
        vocabulary, context = self.vocabulary, () if last_token < 0 else (last_token,)
        if self._spelling is None:
            return tuple(heal(vocabulary, self.dfa, after, encode_after(vocabulary, context, data)))
        try:
            ids = heal(vocabulary, self.dfa, after, encode_after(vocabulary, context, data))
        except ConfigError:  # no tokens end with these bytes; some spell them together with what follows
            return ()
        end = self.dfa.walk(place, vocabulary.decode(ids))
        return tuple(ids) if end is not None and self.can_end(end) else ()

    def ending_bound(self, place: Place) -> int:
        """At least as many tokens as `ending` has: a token for each byte, or exactly as many."""
        if self._spelling is None:
            return self.dfa.ending_bound(place)
        return int(self._spelling.num_tokens[place[0]])

    def ending(self, place: Place) -> tuple[int, ...]:
        """The tokens of the shortest path from `place` to an accepting state."""
        found = self._endings.get(place)
        if found is None:
            if self._spelling is None:
                ids = self.vocabulary.encode(shortest_ending(self.dfa, place))
            else:
                ids = self._spelling.ending(self.dfa, self.vocabulary, place[0])
            found = tuple(ids)
            _remember(self._endings, place, found)
        return found


def _without_counters(dfa: Dfa) -> Dfa:
    if dfa.loops:
        raise GrammarError(
            "the vocabulary lacks tokens for single bytes of the constraint, which counters do not allow for; "
            "compile it with FsmGrammar.compile"
        )
    return dfa


def _remember(memo: dict[K, V], key: K, value: V) -> None:
    if len(memo) >= _MAX_REMEMBERED:
        memo.clear()
    memo[key] = value


class FsmMatcher:
    """One sequence in an automaton: see `graftlm.core.grammar.matcher.Matcher`."""

    __slots__ = ("_grammar", "_history", "_place", "_stopped")

    def __init__(self, grammar: FsmGrammar) -> None:
        self._grammar = grammar
        self._place = grammar.dfa.start
        self._stopped = False
        self._history: list[Place] = []  # the place before each consumed token

    def fill_mask(self, row: MaskRow) -> bool:
        if self._stopped:
            row[:] = 0
        else:
            row[:] = self._grammar.masks.row(self._place)
        return True

    def advance(self, token_ids: Sequence[int]) -> int:
        grammar = self._grammar
        vocabulary, dfa = grammar.vocabulary, grammar.dfa
        for num_consumed, token_id in enumerate(token_ids):
            if self._stopped or not 0 <= token_id < vocabulary.vocab_size:
                return num_consumed
            data = vocabulary.tokens[token_id]
            if data:
                after = dfa.walk(self._place, data)
                if after is None or not grammar.can_end(after):
                    return num_consumed
                self._history.append(self._place)
                self._place = after
                grammar.masks.prefetch(after)
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

    def fork(self) -> FsmMatcher:
        twin = FsmMatcher(self._grammar)
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
        return bool(self._grammar.dfa.accepting[self._place[0]])

    @property
    def finished(self) -> bool:
        return self._stopped or self._grammar.dfa.is_final(self._place)

    @property
    def place(self) -> Place:
        """The automaton's state and the values of its counters."""
        return self._place

    @property
    def state(self) -> int | None:
        """The automaton's state; None where counters are part of the place."""
        return None if self._grammar.dfa.loops else self._place[0]
