"""The llguidance engine, for languages that no automaton holds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from copy import copy
from threading import Lock
from typing import TYPE_CHECKING, TypedDict

import numpy as np

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.engines.byte_tokenizer import tokenizer_of
from graftlm.core.grammar.engines.lark_writer import TOO_MANY_SYMBOLS
from graftlm.core.grammar.matcher import NO_ENDING, MaskRow
from graftlm.core.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher

_MAX_ENDING = 100_000
"""Tokens of an ending."""
_NUM_VARIED = 4
"""Attempts to find an ending that choose characters at random where a string cannot be closed."""
_AT_RANDOM = 0.3
"""Share of the characters outside of strings that they choose at random."""
_LONG_STRING = 500
"""Characters in one string after which an attempt that does not choose at random goes round in circles."""
_SEARCH_S = 3.0
"""Processor time of a search at the beginning of a text, in equal shares for the attempts; a later one gets a quarter.
The engine waits for it, so only a search in vain takes as long."""
_NUM_SUFFIXES = 32
"""Tokens to leave out at the front of an ending that was known before."""


class ParserLimits(TypedDict, total=False):
    """Arguments of LLParserLimits."""

    max_items_in_row: int
    step_max_items: int
    step_lexer_fuel: int
    max_lexer_states: int


_LARGE: ParserLimits = {
    "max_items_in_row": 20_000,  # members that may come next in a long object
    "step_max_items": 200_000,
    "step_lexer_fuel": 5_000_000,  # for one token: about 0.2 s; a matcher without fuel gives up in the middle of a text
}
"""Limits of llguidance's parser for schemas."""
# The marks that end JSON soonest, in the order to try, then the shortest values.
_CLOSERS = (*(b"}", b"]", b",", b":", b"0", b"1", b'"'), *(b"null", b"n", b"true", b"t", b"f", b"[", b"{", b"-", b"a"))
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
        limits: ParserLimits | None = None,
    ) -> None:
        """Compile `source`, a grammar in llguidance's JSON form. Raises LlguidanceRefusal with llguidance's reason.

        limits    arguments of llguidance's LLParserLimits; None for those that large schemas need
        """
        self.vocabulary = vocabulary
        self._limits = _LARGE if limits is None else limits
        self._source = source
        self.start_mask: MaskRow | None = None
        """What may come first, once that was computed."""
        self.start_ending: list[int] | None = None
        """Tokens of a short text, once they were searched for and found."""

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
        limits: ParserLimits | None = None,
    ) -> LlguidanceGrammar:
        """Compile a Lark grammar that starts with `start`."""
        from llguidance import LLMatcher

        return cls(LLMatcher.grammar_from_lark(text), vocabulary, limits=limits)

    @property
    def num_bytes(self) -> int:
        return 64 * len(self._source) + (1 << 16)  # not told by llguidance; items and lexer states, about

    def matcher(self) -> LlguidanceMatcher:
        return LlguidanceMatcher(self, self.start_other_than(None))

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


class LlguidanceMatcher:
    """One sequence in a context-free grammar: see `graftlm.core.grammar.matcher.Matcher`.

    An ending that was found is carried along: the tokens after it shorten it, or leave it as it is. Where neither
    holds, another one is searched for: greedily, several times with different preferences. Without a result
    `min_tokens_to_accept` is NO_ENDING and `ending` is []; going back to the position before finds its ending again.
    llguidance only gets tokens that have bytes: end-of-sequence is allowed exactly in accepting states.
    """

    __slots__ = ("_endings", "_grammar", "_ids", "_matcher", "_start", "_stopped", "_vocabulary")

    fills_outside_lock = True
    """`fill_mask` may run in a thread of its own, beside those of other matchers."""

    def __init__(self, grammar: LlguidanceGrammar, start: LLMatcher) -> None:
        self._grammar = grammar
        self._vocabulary = grammar.vocabulary
        self._start, self._matcher = start, start.deep_copy()
        self._endings: list[tuple[int, list[int] | None]] = []  # the last two: after how many tokens, and the tokens
        self._ids: list[int] = []  # consumed, without end-of-sequence
        self._stopped = False

    def fill_mask(self, row: MaskRow) -> bool:
        if self._stopped:
            row[:] = 0
            return True
        if not self._ids and self._grammar.start_mask is not None:  # all texts of a grammar begin alike
            row[:] = self._grammar.start_mask
            return True
        has_eos = bool(self._vocabulary.eos_token_ids)
        buffer = row if has_eos else np.zeros(_num_words(self._vocabulary), np.int32)
        self._matcher.unsafe_compute_mask_ptr(buffer.ctypes.data, buffer.nbytes)
        if self._matcher.is_error() and self._begun_anew():
            self._matcher.unsafe_compute_mask_ptr(buffer.ctypes.data, buffer.nbytes)
            if self._matcher.is_error():
                self._grammar.forget_start(self._start)
        self._check()
        if not has_eos:
            row[:] = buffer[: len(row)]
            _clear_beyond(row, self._vocabulary)
        _allow_eos(row, self._vocabulary, self.accepting)
        if not self._ids:
            self._grammar.start_mask = row.copy()
        return True

    def advance(self, token_ids: Sequence[int]) -> int:
        if self._stopped:
            return 0
        ids = [int(token_id) for token_id in token_ids]
        end = next((i for i, token_id in enumerate(ids) if not self._has_bytes(token_id)), len(ids))
        consumed = self._consume(ids[:end]) if end else 0
        if consumed == end < len(ids) and ids[end] in self._vocabulary.eos_token_ids and self.accepting:
            self._stopped = True
            return consumed + 1
        return consumed

    def _has_bytes(self, token_id: int) -> bool:
        return 0 <= token_id < self._vocabulary.vocab_size and bool(self._vocabulary.tokens[token_id])

    def _consume(self, token_ids: list[int]) -> int:
        num_consumed = int(self._matcher.try_consume_tokens(token_ids))
        if num_consumed < len(token_ids) and self._matcher.is_error() and self._begun_anew():
            num_consumed = int(self._matcher.try_consume_tokens(token_ids))
        self._ids += token_ids[:num_consumed]
        return num_consumed

    def _begun_anew(self) -> bool:
        """Read the text so far with another lexer: another text may have been too much for the one that they shared."""
        if self._grammar.start_mask is None:  # nothing ever came first
            return False
        self._start = self._grammar.start_other_than(self._start)
        self._matcher = self._start.deep_copy()
        return int(self._matcher.try_consume_tokens(self._ids)) == len(self._ids)

    @property
    def accepting(self) -> bool:
        return self._stopped or bool(self._matcher.is_accepting())

    def rollback(self, num_tokens: int) -> None:
        total = len(self._ids) + self._stopped
        if not 0 <= num_tokens <= total:
            raise ValueError(f"cannot undo {num_tokens} tokens; {total} were consumed")
        if self._stopped and num_tokens:
            self._stopped = False
            num_tokens -= 1
        if num_tokens:
            self._matcher.rollback(num_tokens)
            del self._ids[-num_tokens:]
            self._endings = [known for known in self._endings if known[0] <= len(self._ids)]

    def fork(self) -> LlguidanceMatcher:
        twin = copy(self)
        twin._matcher = self._matcher.deep_copy()
        twin._endings, twin._ids = self._endings.copy(), self._ids.copy()
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
        found = self._find_ending()
        return NO_ENDING if found is None else len(found)

    def ending(self, context: Sequence[int]) -> list[int]:
        return [] if self.accepting else list(self._find_ending() or [])

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

    def _find_ending(self) -> list[int] | None:
        at = len(self._ids)
        if not self._endings or self._endings[-1][0] != at:
            found = self._carried() if at else self._grammar.start_ending
            if found is None:
                found = self._search(_SEARCH_S / 4 if at else _SEARCH_S)
            if not at:
                self._grammar.start_ending = found
            self._endings = [*self._endings[-1:], (at, found)]
        return self._endings[-1][1]

    def _carried(self) -> list[int] | None:
        """Return the last ending without tokens at its front, if it is one here as well."""
        position, known = next((entry for entry in reversed(self._endings) if entry[1]), (0, None))
        if known is None:
            return None
        since = self._ids[position:]
        if known[: len(since)] == since:
            return known[len(since) :]
        # most tokens change nothing about how to end; in a string some of the ending's characters are not needed again
        suffixes = (known[i:] for i in range(min(len(known), _NUM_SUFFIXES)))
        return next((ids for ids in suffixes if self._ends(ids)), None)

    def _ends(self, token_ids: list[int]) -> bool:
        probe = self._matcher.deep_copy()
        return probe.try_consume_tokens(token_ids) == len(token_ids) and probe.is_accepting()

    def _search(self, seconds: float) -> list[int] | None:
        """Try several preferences; at the beginning return the shorter of two endings."""
        closers = _closing_tokens(self._vocabulary)
        order = [closers[data] for data in _CLOSERS if data in closers]
        quotes = [closers[b'"']] if b'"' in closers else []
        found: list[list[int]] = []
        for attempt in range(-2, _NUM_VARIED):
            rng = np.random.default_rng(attempt) if attempt >= 0 else None
            first = order if attempt != -1 else [*quotes, *order]
            ids = self._follow(first, quotes, rng, time.thread_time() + seconds / (_NUM_VARIED + 2))
            found += [] if ids is None else [ids]
            if found and (self._ids or attempt >= -1):
                return min(found, key=len)
        return None

    def _follow(
        self, order: Sequence[int], quotes: Sequence[int], rng: np.random.Generator | None, stop: float
    ) -> list[int] | None:
        """Write forced tokens and else the first allowed token of `order`, up to an accepting state.

        quotes  tokens to prefer inside of strings
        rng     chooses inside of strings, where those are not allowed, and sometimes outside
        stop    the processor time of this thread at which to give up
        """
        probe = self._matcher.deep_copy()
        row = np.zeros(_num_words(self._vocabulary), np.int32)
        in_string = _string_state(self._vocabulary.decode(self._ids), 0)
        found: list[int] = []
        num_characters = 0  # chosen in this string
        while len(found) < _MAX_ENDING and time.thread_time() < stop:
            if probe.is_accepting():
                return found
            ids = probe.compute_ff_tokens()
            if not ids:
                probe.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
                preferred = [*quotes, *order] if in_string else order
                if rng is not None and (in_string or rng.random() < _AT_RANDOM):
                    preferred = [*(quotes if in_string else ()), *_some_character(row, rng, self._vocabulary)]
                chosen = _choose(row, preferred, self._vocabulary)
                num_characters = num_characters + 1 if in_string else 0
                if chosen is None or num_characters > _LONG_STRING and rng is None:
                    return None
                ids = [chosen]
            if probe.try_consume_tokens(ids) < len(ids):
                return None
            found += ids
            in_string = _string_state(self._vocabulary.decode(ids), in_string)
        return None


def _choose(row: MaskRow, order: Sequence[int], vocabulary: Vocabulary) -> int | None:
    """Return the first allowed token of `order`, else the shortest one that is not blank."""
    for token_id in order:
        if _allowed(row, token_id):
            return token_id
    tokens = vocabulary.tokens
    written = _written(row, vocabulary)
    solid = [i for i in written if not set(tokens[i]) <= _BLANK]
    return min(solid or written, key=lambda i: len(tokens[i]), default=None)


def _some_character(row: MaskRow, rng: np.random.Generator, vocabulary: Vocabulary) -> list[int]:
    """Return one of the printable ASCII characters that are allowed, in a list, or none."""
    tokens = vocabulary.tokens
    plain = [i for i in _written(row, vocabulary) if len(tokens[i]) == 1 and 0x20 < tokens[i][0] < 0x7F]
    return [plain[int(rng.integers(len(plain)))]] if plain else []


def _written(row: MaskRow, vocabulary: Vocabulary) -> list[int]:
    """Return the first allowed tokens that have bytes."""
    allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[: vocabulary.vocab_size])
    return [i for i in allowed[:4096].tolist() if vocabulary.tokens[i]]


def _string_state(data: bytes, state: int) -> int:
    """Return whether JSON is inside of a string after `data`: 0 outside, 1 inside, 2 after a backslash in it."""
    for byte in data:
        if state == 2:
            state = 1
        elif byte == 0x22:
            state = 1 - state
        elif byte == 0x5C and state:
            state = 2
    return state


def _allowed(row: MaskRow, token_id: int) -> bool:
    return bool(int(row[token_id >> 5]) >> (token_id & 31) & 1)


def _closing_tokens(vocabulary: Vocabulary) -> dict[bytes, int]:
    nodes = vocabulary.trie.nodes
    found = {data: vocabulary.trie.find(data) for data in _CLOSERS}
    return {data: int(nodes[node, 3]) for data, node in found.items() if node >= 0 and nodes[node, 3] >= 0}


def _num_words(vocabulary: Vocabulary) -> int:
    """Words of a row that also holds the end-of-sequence id lent to a vocabulary without one."""
    return vocabulary.num_words if vocabulary.eos_token_ids else (vocabulary.vocab_size + 32) // 32


def _allow_eos(row: MaskRow, vocabulary: Vocabulary, allowed: bool) -> None:
    """Set or clear the bits of all end-of-sequence ids."""
    bits = row.view(np.uint32)
    for token_id in vocabulary.eos_token_ids:
        bit = np.uint32(1 << (token_id & 31))
        bits[token_id >> 5] = bits[token_id >> 5] | bit if allowed else bits[token_id >> 5] & ~bit


def _clear_beyond(row: MaskRow, vocabulary: Vocabulary) -> None:
    """Clear the bits after the last token of the vocabulary."""
    if vocabulary.vocab_size & 31:
        row.view(np.uint32)[-1] &= np.uint32((1 << (vocabulary.vocab_size & 31)) - 1)


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
