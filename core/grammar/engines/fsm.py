"""The native grammar engine: a byte-level DFA, advanced token by token."""

from __future__ import annotations

from collections.abc import Sequence

from graftlm.core.errors import ConfigError, GrammarError
from graftlm.core.grammar.automata.dfa import Dfa, Place
from graftlm.core.grammar.automata.endings import shortest_ending
from graftlm.core.grammar.automata.products.product import without_products
from graftlm.core.grammar.engines.automaton import AutomatonGrammar, AutomatonMatcher
from graftlm.core.grammar.masks.masks import Masks
from graftlm.core.grammar.masks.spelling import Spelling, of_single_bytes
from graftlm.core.grammar.masks.trie_walk import first_continued
from graftlm.core.grammar.nodes.nodes import Node
from graftlm.core.grammar.spec import Limits
from graftlm.core.grammar.vocabulary import Vocabulary


class FsmGrammar(AutomatonGrammar):
    """A DFA over one vocabulary."""

    engine = "fsm"

    def __init__(self, dfa: Dfa, vocabulary: Vocabulary, *, max_mask_bytes: int = 64 << 20) -> None:
        """Use `dfa` as it is; where its states do not end by bytes that are tokens, it must be one without counters.

        Raises GrammarError when the vocabulary cannot spell any text of the language.
        """
        self.dfa = dfa
        self._by_bytes = of_single_bytes(dfa, vocabulary)
        self._spelling = Spelling.of(_without_counters(dfa), vocabulary) if self._by_bytes is None else None
        super().__init__(dfa, vocabulary, Masks(dfa, vocabulary, max_mask_bytes, self._spelling))

    @classmethod
    def compile(cls, node: Node, vocabulary: Vocabulary, limits: Limits | None = None) -> FsmGrammar:
        """Compile `node`.

        Raises GrammarError if nothing matches, the automaton exceeds `limits`, or the vocabulary cannot spell it.
        """
        limits = limits or Limits()
        node = without_products(node)
        dfa = Dfa.compile(node, limits)
        if dfa.loops and of_single_bytes(dfa, vocabulary) is None:
            dfa = Dfa.compile(node, limits, counters=False)
        return cls(dfa, vocabulary)

    def matcher(self) -> AutomatonMatcher:
        return AutomatonMatcher(self)

    def first_continued(self, suffix: bytes, place: Place) -> int:
        return first_continued(self.vocabulary.trie, suffix, self.dfa, place)

    def can_end(self, place: Place) -> bool:
        return self._spelling is None or bool(self._spelling.reachable[place[0]])

    def _healed(self, last_token: int, place: Place, data: bytes, after: Place) -> tuple[int, ...]:
        if self._by_bytes is self.dfa:
            return super()._healed(last_token, place, data, after)
        try:
            ids = super()._healed(last_token, place, data, after)
        except ConfigError:  # only tokens with bytes of the text that follows spell the end of `data`
            return ()
        end = self.dfa.walk(place, self.vocabulary.decode(ids))
        return ids if end is not None and self.can_end(end) else ()

    def ending_bound(self, place: Place) -> int:
        """At least as many tokens as `ending` has: a token for each byte, or exactly as many."""
        if self._spelling is None:
            return (self._by_bytes or self.dfa).ending_bound(place)
        return int(self._spelling.num_tokens[place[0]])

    def shortest_ending(self, place: Place) -> Sequence[int]:
        if self._spelling is None:
            return self.vocabulary.encode(shortest_ending(self._by_bytes or self.dfa, place))
        return self._spelling.ending(self.dfa, self.vocabulary, place[0])


def _without_counters(dfa: Dfa) -> Dfa:
    if dfa.loops:
        raise GrammarError(
            "the vocabulary lacks tokens for single bytes of the constraint, which counters do not allow for; "
            "compile it with FsmGrammar.compile"
        )
    return dfa
