"""The native engine of context-free grammars: a deterministic pushdown automaton, advanced token by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.automata.dfa import Place
from graftlm.core.grammar.automata.endings import EndingTooLongError
from graftlm.core.grammar.automata.stack.dpda import Dpda
from graftlm.core.grammar.automata.stack.dpda_builder import build_dpda
from graftlm.core.grammar.engines.automaton import AutomatonGrammar, AutomatonMatcher
from graftlm.core.grammar.masks.masks import StackMasks
from graftlm.core.grammar.masks.spelling import is_complete
from graftlm.core.grammar.masks.stack_walk import first_continued
from graftlm.core.grammar.nodes.nodes import Node
from graftlm.core.grammar.spec import Limits
from graftlm.core.grammar.vocabulary import Vocabulary

_MAX_ENDING = 100_000


class PdaGrammar(AutomatonGrammar):
    """A pushdown automaton over one vocabulary, which has a token for each byte that the automaton reads."""

    engine = "pda"

    def __init__(self, dpda: Dpda, vocabulary: Vocabulary, *, max_mask_bytes: int = 64 << 20) -> None:
        """Raises GrammarError when the vocabulary lacks tokens for single bytes."""
        if not is_complete(dpda, vocabulary):
            raise GrammarError(
                "the vocabulary lacks tokens for single bytes of the constraint, which a pushdown automaton needs; "
                "let the engine be chosen"
            )
        self.dpda = dpda
        super().__init__(dpda, vocabulary, StackMasks(dpda, vocabulary, max_mask_bytes))

    @classmethod
    def compile(
        cls,
        node: Node,
        rules: Mapping[str, Node],
        vocabulary: Vocabulary,
        limits: Limits | None = None,
    ) -> PdaGrammar:
        """Compile `node` and the rules that it names. Raises GrammarError, as `build_dpda` does."""
        return cls(build_dpda(node, rules, limits), vocabulary)

    def matcher(self) -> AutomatonMatcher:
        return AutomatonMatcher(self)

    def first_continued(self, suffix: bytes, place: Place) -> int:
        return first_continued(self.vocabulary.trie, suffix, self.dpda, place)

    def shortest_ending(self, place: Place) -> Sequence[int]:
        if self.dpda.ending_bound(place) > _MAX_ENDING:
            raise EndingTooLongError(f"the shortest text has more than {_MAX_ENDING:,} bytes; lower its minimums")
        return self.vocabulary.encode(self.dpda.ending(place))
