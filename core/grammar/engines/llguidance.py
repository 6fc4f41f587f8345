"""The llguidance engine, for languages that no automaton holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.engines.byte_tokenizer import tokenizer_of
from graftlm.core.grammar.engines.lark_writer import TOO_MANY_SYMBOLS
from graftlm.core.grammar.engines.library import LibraryMatcher, allow_eos, clear_beyond
from graftlm.core.grammar.matcher import MaskRow
from graftlm.core.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher

_MAX_STEPS = 256
_LARGE = {
    "max_items_in_row": 20_000,  # members that may come next in a long object
    "step_max_items": 200_000,
    "step_lexer_fuel": 5_000_000,  # for one token: about 0.2 s; a matcher without fuel gives up in the middle of a text
}
"""Limits of llguidance's parser for schemas."""
# What ends JSON soonest, in the order to try: closing marks, what leads to the next member, the shortest values.
_CLOSERS = (*(b"}", b"]", b",", b":", b"0", b"1", b'"'), *(b"null", b"n", b"true", b"t", b"f", b"[", b"{", b"-", b"a"))
_IN_STRING = b"#"  # outside of strings JSON never has it
_BLANK = frozenset(b" \t\r\n")


class LlguidanceRefusal(GrammarError):
    """llguidance cannot compile a grammar."""


class LlguidanceGrammar:
    """A grammar text compiled for one vocabulary."""

    engine = "llguidance"

    def __init__(
        self,
        source: str,
        vocabulary: Vocabulary,
        *,
        limits: Mapping[str, int] | None = None,
    ) -> None:
        """Compile `source`, a grammar in llguidance's JSON form. Raises LlguidanceRefusal with llguidance's reason.

        limits    arguments of llguidance's LLParserLimits; None for those that large schemas need
        """
        self.vocabulary = vocabulary
        self._limits = _LARGE if limits is None else limits
        self._source = source
        self.start_mask: MaskRow | None = None
        """What may come first, once that was computed."""

        self._lock = Lock()
        self._start: LLMatcher | None = self._compiled()

    def _compiled(self) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(**self._limits)
        found = LLMatcher(tokenizer_of(self.vocabulary), self._source, log_level=0, limits=limits)
        if found.is_error():
            reason = _reason(found)
            too_large = next((words for sign, words in _TOO_LARGE.items() if sign in reason), None)
            raise LlguidanceRefusal(too_large or f"llguidance cannot compile the grammar: {reason}")
        return found

    @classmethod
    def from_lark(
        cls,
        text: str,
        vocabulary: Vocabulary,
        *,
        limits: Mapping[str, int] | None = None,
    ) -> LlguidanceGrammar:
        """Compile a Lark grammar that starts with `start`."""
        from llguidance import LLMatcher

        return cls(LLMatcher.grammar_from_lark(text), vocabulary, limits=limits)

    @property
    def num_bytes(self) -> int:
        return 64 * len(self._source) + (1 << 16)  # not told by llguidance; items and lexer states, about

    def matcher(self) -> LlguidanceMatcher:
        start = self.start_other_than(None)
        matcher = LlguidanceMatcher(start.deep_copy(), self.vocabulary)
        matcher.grammar, matcher.start = self, start
        return matcher

    def start_other_than(self, spent: LLMatcher | None) -> LLMatcher:
        """The matcher at the beginning of a text, compiled anew where it is `spent`; None takes it as it is.

        All copies of a matcher share its lexer; one that gave up, for a single text, takes nothing any more.
        """
        with self._lock:
            if self._start is None or self._start is spent:
                self._start = self._compiled()
            return self._start

    def forget_start(self, spent: LLMatcher) -> None:
        """Have the matcher at the beginning compiled anew for the next text, if it is `spent`."""
        with self._lock:
            if self._start is spent:
                self._start = None


class LlguidanceMatcher(LibraryMatcher):
    """One sequence in a context-free grammar: see `graftlm.core.grammar.matcher.Matcher`.

    Endings are found by a greedy search of at most 256 steps. Without a result `ending` is [] and
    `min_tokens_to_accept` is 0 though the matcher is not accepting: the text then runs until its budget is spent and
    may be cut.
    """

    __slots__ = ("_ending", "_ids", "grammar", "start")

    fills_outside_lock = True
    """`fill_mask` may run in a thread of its own, beside those of other matchers."""

    _matcher: LLMatcher

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary) -> None:
        super().__init__(matcher, vocabulary)
        self._ending: tuple[int, list[int]] | None = None  # for which num_consumed, and the tokens
        self._ids: list[int] = []
        self.grammar: LlguidanceGrammar | None = None
        self.start: LLMatcher | None = None  # of which the matcher is a copy

    def fill_mask(self, row: MaskRow) -> bool:
        if self._stopped:
            row[:] = 0
            return True
        begun = self.grammar if not self._num_consumed else None  # all texts of a grammar begin alike
        if begun is not None and begun.start_mask is not None:
            row[:] = begun.start_mask
            return True
        has_eos = bool(self._vocabulary.eos_token_ids)
        buffer = row if has_eos else np.zeros(_num_words(self._vocabulary), np.int32)
        self._matcher.unsafe_compute_mask_ptr(buffer.ctypes.data, buffer.nbytes)
        if self._matcher.is_error() and self._begun_anew():
            self._matcher.unsafe_compute_mask_ptr(buffer.ctypes.data, buffer.nbytes)
            if self._matcher.is_error() and self.grammar is not None and self.start is not None:
                self.grammar.forget_start(self.start)
        self._check()
        if not has_eos:
            row[:] = buffer[: len(row)]
            clear_beyond(row, self._vocabulary)
        allow_eos(row, self._vocabulary, self.accepting)
        if begun is not None:
            begun.start_mask = row.copy()
        return True

    def _consume(self, token_ids: list[int]) -> int:
        num_consumed = int(self._matcher.try_consume_tokens(token_ids))
        if num_consumed < len(token_ids) and self._matcher.is_error() and self._begun_anew():
            num_consumed = int(self._matcher.try_consume_tokens(token_ids))
        self._ids += token_ids[:num_consumed]
        return num_consumed

    def _begun_anew(self) -> bool:
        """Read the text so far with another lexer: another text may have been too much for the one that they shared."""
        if self.grammar is None or self.start is None or self.grammar.start_mask is None:  # nothing ever came first
            return False
        self.start = self.grammar.start_other_than(self.start)
        self._matcher = self.start.deep_copy()
        return int(self._matcher.try_consume_tokens(self._ids)) == len(self._ids)

    def _copy(self) -> LLMatcher:
        return self._matcher.deep_copy()

    def _accepts(self) -> bool:
        return bool(self._matcher.is_accepting())

    def rollback(self, num_tokens: int) -> None:
        num_consumed = self._num_consumed
        super().rollback(num_tokens)
        if self._num_consumed != num_consumed:
            self._ending = None
            del self._ids[self._num_consumed :]

    def fork(self) -> LlguidanceMatcher:
        twin: LlguidanceMatcher = super().fork()
        twin._ending, twin._ids = self._ending, self._ids.copy()
        twin.grammar, twin.start = self.grammar, self.start
        return twin

    def forced(self, context: Sequence[int]) -> list[int]:
        if self._stopped or self._matcher.is_stopped():
            return []
        return list(self._matcher.compute_ff_tokens())

    def forced_bytes(self) -> bytes:
        if self._stopped or self._matcher.is_stopped():
            return b""
        return self._matcher.compute_ff_bytes()

    def min_tokens_to_accept(self) -> int:
        if self.accepting:
            return 0
        return len(self._find_ending())

    def ending(self, context: Sequence[int]) -> list[int]:
        return [] if self.accepting else list(self._find_ending())

    @property
    def finished(self) -> bool:
        if self._stopped or not self._matcher.is_stopped():
            return self._stopped
        self._check()  # what gave up has stopped as well
        return True

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = _reason(self._matcher)
            if reason == "NoExtensionBias":
                reason = "no text goes on from here, as a pattern or a rule matches none; correct it"
            raise GrammarError(f"llguidance gave up inside the grammar: {reason}")

    def _find_ending(self) -> list[int]:
        if self._ending is None or self._ending[0] != self._num_consumed:
            self._ending = (self._num_consumed, self._searched())
        return self._ending[1]

    def _searched(self) -> list[int]:
        known = self._ending[1] if self._ending is not None else []
        # most tokens change nothing about how to end, or are the first of the ending themselves
        found = next((old for old in (known, known[1:]) if old and self._ends(old)), None)
        return self._search() if found is None else found

    def _ends(self, token_ids: list[int]) -> bool:
        probe = self._matcher.deep_copy()
        return probe.try_consume_tokens(token_ids) == len(token_ids) and probe.is_accepting()

    def _search(self) -> list[int]:
        """Follow forced tokens, and else the token that closes most, to an accepting state."""
        closers = _closing_tokens(self._vocabulary)
        quotes = [closers[b'"']] if b'"' in closers else []
        inside = closers.pop(_IN_STRING, None)
        order = [closers[data] for data in _CLOSERS if data in closers]
        return self._follow(order, quotes, inside) or self._follow([*quotes, *order], [], None)

    def _follow(self, order: Sequence[int], in_string: Sequence[int], inside: int | None) -> list[int]:
        """Write the first allowed token of `order` again and again; of `in_string` where `inside` is allowed."""
        probe = self._matcher.deep_copy()
        row = np.zeros(_num_words(self._vocabulary), np.int32)
        found: list[int] = []
        while len(found) < _MAX_STEPS:
            if probe.is_accepting():
                return found
            ids = probe.compute_ff_tokens()
            if not ids:
                probe.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
                first = in_string if inside is not None and _allowed(row, inside) else ()
                chosen = self._choose(row, [*first, *order])
                if chosen is None:
                    return []
                ids = [chosen]
            if probe.try_consume_tokens(ids) < len(ids):
                return []
            found += ids
        return []

    def _choose(self, row: MaskRow, order: Sequence[int]) -> int | None:
        for token_id in order:
            if _allowed(row, token_id):
                return token_id
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        written = [int(i) for i in allowed[:4096] if self._has_bytes(int(i))]
        solid = [i for i in written if not set(self._vocabulary.tokens[i]) <= _BLANK]
        return min(solid or written, key=lambda i: len(self._vocabulary.tokens[i]), default=None)


def _allowed(row: MaskRow, token_id: int) -> bool:
    return bool(int(row[token_id >> 5]) >> (token_id & 31) & 1)


def _closing_tokens(vocabulary: Vocabulary) -> dict[bytes, int]:
    nodes = vocabulary.trie.nodes
    found = {data: vocabulary.trie.find(data) for data in (*_CLOSERS, _IN_STRING)}
    return {data: int(nodes[node, 3]) for data, node in found.items() if node >= 0 and nodes[node, 3] >= 0}


def _num_words(vocabulary: Vocabulary) -> int:
    """Words of a row that also holds the end-of-sequence id lent to a vocabulary without one."""
    return vocabulary.num_words if vocabulary.eos_token_ids else (vocabulary.vocab_size + 32) // 32


_TOO_LARGE = {
    "symbols.len()": TOO_MANY_SYMBOLS,
    "lexer configuration": "the values and patterns of the constraint together are too large for llguidance's lexer, "
    "which holds about 50,000 numbers of an enum; split the enum, or describe its values by bounds or a pattern",
    "fuel exhausted": "what may come next is too much for llguidance's lexer; let fewer parts be left out in a row, or "
    "write them as repeats",
}
"""Limits of llguidance by what its own words for them contain."""


def _reason(matcher: LLMatcher) -> str:
    return matcher.get_error().strip().splitlines()[0][:300]
