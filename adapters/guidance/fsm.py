"""A regular guidance grammar on the compressed automaton, stepped the way guidance steps its parser."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Self
from weakref import WeakKeyDictionary

import numpy as np

from graftlm.adapters.guidance.lowering import Free, Regular
from graftlm.adapters.guidance.parser import Progress
from graftlm.core.grammar.automata.dfa import Place
from graftlm.core.grammar.engines.fsm import FsmGrammar
from graftlm.core.grammar.masks.healing import heal
from graftlm.core.grammar.masks.packed_row import write
from graftlm.core.grammar.matcher import MaskRow
from graftlm.core.grammar.vocabulary import Vocabulary
from graftlm.core.request import Request

_HEALED = 16  # tokens at the end of a prompt; healing removes fewer


class _Before(NamedTuple):
    """The state of a parser before a token."""

    place: tuple[FsmGrammar, Place, bytes, Free | None, int, list[int]]
    text: int
    tokens: int
    num_written: int
    num_forced: int


class FsmParser:
    """A parser over the compressed automaton, in place of `graftlm.adapters.guidance.parser.Parser`.

    Healing can remove the prompt's last tokens; `_prefix` are their bytes, which the first tokens must spell. At the
    token limit of leading free text the state moves to `rest`, the automaton of the part after the free text.
    """

    def __init__(self, regular: Regular, grammar: FsmGrammar, rest: FsmGrammar | None = None) -> None:
        self.tokens: list[int] = []
        self.steps: list[Progress] = []
        self.stopped = False
        self.num_forced = 0
        self._num_written = 0
        self._regular = regular
        self._grammar = grammar
        self._rest = rest
        self._free = regular.free
        self._num_free = 0
        self._place = grammar.dfa.start
        self._prefix = b""
        self._text = bytearray()
        self._expected: list[int] = []
        self._history: list[_Before] = []

    def start(self, tokens: list[int], forced: bytes) -> None:
        """Start after `tokens`, the canonical ids of the prompt and of `forced`, the grammar's first bytes."""
        vocabulary, dfa = self._grammar.vocabulary, self._grammar.dfa
        _, after = self._grammar.run(dfa.start)
        # no token spans a special token, which has no bytes: healing stops there
        least = max(len(tokens) - _HEALED, 0)
        first = next((i + 1 for i in range(len(tokens) - 1, least - 1, -1) if not vocabulary.tokens[tokens[i]]), least)
        kept = tokens[:first] + heal(vocabulary, dfa, after, tokens[first:])
        taken_back = vocabulary.decode(tokens[len(kept) :])
        written = forced[: max(len(forced) - len(taken_back), 0)]
        self._prefix = taken_back[: max(len(taken_back) - len(forced), 0)]
        self.tokens = kept
        self._advance(written)
        self.stopped = dfa.is_final(self._place)
        self.steps.append(self._progress(bytes(written), ()))

    def run_in(self, request: Request) -> None:
        """Become the matcher of `request`, whose prompt is `tokens`."""
        self._num_written = 0
        self._history.clear()
        request.sampling = replace(request.sampling, temperature=self._regular.temperature)

    def end_of_text(self, token_id: int) -> None:
        """Stop after a sampled end-of-text token, which is allowed only in an accepting state."""
        self.stopped = True
        self.steps.append(self._progress(b"", ()))

    def check_end(self) -> None:
        """Do nothing: an automaton never stops outside its language."""

    # -- Matcher -----------------------------------------------------------------------------------------------

    def matcher(self) -> Self:
        return self

    def fill_mask(self, row: MaskRow) -> bool:
        if self._prefix:
            row[:] = _healing_row(self._grammar, self._place, self._prefix, len(row))
            return True
        if self.accepting:
            return False
        write(self._grammar.masks.row(self._place), row)
        return True

    def advance(self, token_ids: Sequence[int]) -> int:
        for i, token_id in enumerate(token_ids):
            if self.stopped:
                return i
            before = self._before()
            self._num_written += 1
            issued = self._expected[:1] != [token_id]
            self._expected = [] if issued else self._expected[1:]
            if not self._take(token_id, issued):
                if not self.accepting:
                    self._return_to(before)
                    return i
                self.end_of_text(token_id)  # guidance's semantics: a token that the grammar refuses ends the text
            self._history.append(before)
        return len(token_ids)

    def forced(self, context: Sequence[int]) -> list[int]:
        if self.stopped or self._prefix:
            return []
        self._expected = list(self._grammar.forced(self._place, int(context[-1]) if len(context) else -1))
        return list(self._expected)

    def forced_bytes(self) -> bytes:
        return b"" if self.stopped or self._prefix else self._grammar.run(self._place)[0]

    def rollback(self, num_tokens: int) -> None:
        if not 0 <= num_tokens <= len(self._history):
            raise ValueError(f"cannot undo {num_tokens} tokens; {len(self._history)} were consumed")
        if num_tokens:
            self._return_to(self._history[-num_tokens])
            del self._history[-num_tokens:]
            del self.steps[-num_tokens:]  # one step per token; steps of unwritten tokens were not consumed yet

    def fork(self) -> FsmParser:
        twin = FsmParser(self._regular, self._grammar, self._rest)
        twin.__dict__.update(self.__dict__)
        twin.tokens, twin.steps, twin._text = list(self.tokens), list(self.steps), bytearray(self._text)
        twin._history = list(self._history)
        return twin

    def min_tokens_to_accept(self) -> int:
        return 0

    def ending(self, context: Sequence[int]) -> list[int]:
        return []

    @property
    def accepting(self) -> bool:
        return not self._prefix and bool(self._grammar.dfa.accepting[self._place[0]])

    @property
    def finished(self) -> bool:
        return self.stopped

    # -- steps -------------------------------------------------------------------------------------------------

    def _before(self) -> _Before:
        place = (self._grammar, self._place, self._prefix, self._free, self._num_free, self._expected)
        return _Before(place, len(self._text), len(self.tokens), self._num_written, self.num_forced)

    def _return_to(self, before: _Before) -> None:
        place, text, tokens, self._num_written, self.num_forced = before
        self._grammar, self._place, self._prefix, self._free, self._num_free, self._expected = place
        self.stopped = False
        del self._text[text:]
        del self.tokens[tokens:]

    def _take(self, token_id: int, issued: bool) -> bool:
        data = self._grammar.vocabulary.tokens[token_id] if token_id < self._grammar.vocabulary.vocab_size else b""
        shared = min(len(data), len(self._prefix))
        if not data or data[:shared] != self._prefix[:shared]:
            return False
        written = data[shared:]
        if not self._advance(written):
            return False
        self._prefix = self._prefix[shared:]
        self.tokens.append(token_id)
        self.num_forced += not issued
        self.stopped = not self._prefix and self._grammar.dfa.is_final(self._place)
        tokens: tuple[int, ...] = (token_id,)
        if self._free is not None and written and self._ends_free(self._free):
            written = written[:-1]
            tokens, issued = tuple(self._grammar.vocabulary.encode(data[:-1])), False
            self.tokens[-1:] = tokens
            self.num_forced += len(tokens)
        self.steps.append(self._progress(written, tokens, issued=issued))
        return True

    def _ends_free(self, free: Free) -> bool:
        """Count one token of the free text, or end it; return True if it ends with a stop that is not shown."""
        if free.stop is not None and free.stop.encode() in self._text:
            self._free = None
            if free.rest is None:
                del self._text[-1:]
            return free.rest is None
        self._num_free += 1
        if free.max_tokens is not None and self._num_free >= free.max_tokens:
            self._free = None
            if self._rest is None:
                self.stopped = True
            else:
                self._grammar, self._place = self._rest, self._rest.dfa.start
        return False

    def _advance(self, data: bytes) -> bool:
        after = self._grammar.dfa.walk(self._place, bytes(data))
        if after is None:
            return False
        self._place = after
        self._text += data
        return True

    def _progress(self, written: bytes, tokens: tuple[int, ...], *, issued: bool = False) -> Progress:
        captures = self._regular.read(bytes(self._text)) if self.stopped else {}
        return Progress(tokens, issued, text=written, captures=captures, at=self._num_written)


_healing_rows: WeakKeyDictionary[FsmGrammar, dict[tuple[Place, bytes], MaskRow]] = WeakKeyDictionary()
_sorted: WeakKeyDictionary[Vocabulary, tuple[list[bytes], list[int]]] = WeakKeyDictionary()


def _sorted_tokens(vocabulary: Vocabulary) -> tuple[list[bytes], list[int]]:
    """Return the vocabulary's tokens in sorted order, and the id of each; cached."""
    known = _sorted.get(vocabulary)
    if known is None:
        order = sorted((data, i) for i, data in enumerate(vocabulary.tokens) if data)
        known = _sorted[vocabulary] = ([data for data, _ in order], [i for _, i in order])
    return known


def _healing_row(grammar: FsmGrammar, place: Place, prefix: bytes, num_words: int) -> MaskRow:
    """Return the mask of tokens that spell the prefix, a part of it, or the prefix and a valid continuation; cached."""
    rows = _healing_rows.setdefault(grammar, {})
    key = (place, prefix)
    if key not in rows:
        allowed = np.zeros(32 * num_words, np.uint8)
        allowed[_healing_tokens(grammar, place, prefix)] = 1
        rows[key] = np.packbits(allowed, bitorder="little").view(np.int32)
    return rows[key]


def _healing_tokens(grammar: FsmGrammar, place: Place, prefix: bytes) -> list[int]:
    tokens, ids = _sorted_tokens(grammar.vocabulary)
    found: list[int] = []
    for length in range(1, len(prefix)):
        first, end = bisect_left(tokens, prefix[:length]), bisect_right(tokens, prefix[:length])
        found += ids[first:end]
    for i in range(bisect_left(tokens, prefix), len(tokens)):
        if not tokens[i].startswith(prefix):
            break
        if grammar.dfa.walk(place, tokens[i][len(prefix) :]) is not None:
            found.append(ids[i])
    return found
