"""Fields with several options, each chosen as a whole: the likeliest option wins.

Greedy decoding would follow the option whose first token is the likeliest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graftlm.adapters.dspy.chain import Grammar
from graftlm.core.grammar.masks.healing import encode_after
from graftlm.core.grammar.matcher import MaskRow, Matcher
from graftlm.core.grammar.vocabulary import Vocabulary

END = b"\n\n"
"""The end of a value. It is scored with each option, so that a prefix of another option has no advantage."""


class Choosing:
    """A grammar whose matchers report where to choose an option (`graftlm.core.scheduling.choice.Chooser`).

    choices  the options after each header; a header occurs once in an output
    """

    def __init__(self, grammar: Grammar, choices: Mapping[str, Sequence[str]], vocabulary: Vocabulary) -> None:
        self.grammar = grammar
        self.vocabulary = vocabulary
        self.choices = [
            (header.encode(), [option.encode() + END for option in options]) for header, options in choices.items()
        ]

    def matcher(self) -> ChoosingMatcher:
        return ChoosingMatcher(self, self.grammar.matcher())


class ChoosingMatcher:
    """The grammar's own matcher of one sequence, and the bytes that it has consumed."""

    def __init__(self, rules: Choosing, inner: Matcher) -> None:
        self._rules = rules
        self._inner = inner
        self._text = bytearray()
        self._lengths: list[int] = []  # length of `_text` before each consumed token

    def options(self, context: Sequence[int]) -> list[list[int]]:
        """Return the token ids of each option; [] without a choice. See `graftlm.core.scheduling.choice.Chooser`.

        Forced bytes of the grammar are part of each option.
        """
        ahead = self._inner.forced_bytes()
        text = bytes(self._text) + ahead
        for header, options in self._rules.choices:
            at = text.rfind(header)
            begun = text[at + len(header) :]
            if at < 0 or len(begun) >= max(map(len, options)):
                continue
            possible = [option for option in options if option.startswith(begun) and len(option) > len(begun)]
            if len(possible) > 1:
                return self._encoded(context, [ahead + option[len(begun) :] for option in possible])
        return []

    def _encoded(self, context: Sequence[int], texts: list[bytes]) -> list[list[int]]:
        """Return the token ids of each text; [] if the grammar refuses the tokens of one."""
        found = [encode_after(self._rules.vocabulary, context, text) for text in texts]
        for ids in found:
            num_consumed = self._inner.advance(ids)
            self._inner.rollback(num_consumed)
            if num_consumed < len(ids):
                return []
        return found

    # -- Matcher -----------------------------------------------------------------------------------------------

    def fill_mask(self, row: MaskRow) -> bool:
        return self._inner.fill_mask(row)

    def advance(self, token_ids: Sequence[int]) -> int:
        num_consumed = self._inner.advance(token_ids)
        tokens = self._rules.vocabulary.tokens
        for token_id in token_ids[:num_consumed]:
            self._lengths.append(len(self._text))
            self._text += tokens[token_id]
        return num_consumed

    def rollback(self, num_tokens: int) -> None:
        self._inner.rollback(num_tokens)
        if num_tokens:
            del self._text[self._lengths[-num_tokens] :]
            del self._lengths[-num_tokens:]

    def fork(self) -> ChoosingMatcher:
        twin = ChoosingMatcher(self._rules, self._inner.fork())
        twin._text, twin._lengths = bytearray(self._text), self._lengths.copy()
        return twin

    def forced(self, context: Sequence[int]) -> list[int]:
        return self._inner.forced(context)

    def forced_bytes(self) -> bytes:
        return self._inner.forced_bytes()

    def min_tokens_to_accept(self) -> int:
        return self._inner.min_tokens_to_accept()

    def ending(self, context: Sequence[int]) -> list[int]:
        return self._inner.ending(context)

    @property
    def accepting(self) -> bool:
        return self._inner.accepting

    @property
    def finished(self) -> bool:
        return self._inner.finished
