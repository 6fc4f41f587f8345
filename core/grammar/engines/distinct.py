"""Another engine's grammar in which items of arrays must differ: its masks without the tokens that would repeat one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from graftlm.core.grammar.matcher import MaskRow, Matcher
from graftlm.core.grammar.schema.cursor import ESCAPE, KEY_ESCAPE, KEY_STRING, STRING, Cursor
from graftlm.core.grammar.schema.distinct_items import DistinctItems
from graftlm.core.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    from graftlm.core.grammar.compile import EngineGrammar

_FEW = 2_048  # so many tokens are looked at one by one
_MAX_STEPS = 512
_MAX_SECONDS = 2.0
_MAX_TRIED = 48


class DistinctGrammar:
    """A grammar of JSON text, and the arrays in it whose items must differ."""

    def __init__(self, base: EngineGrammar, items: DistinctItems, vocabulary: Vocabulary) -> None:
        self.base = base
        self.items = items
        self.vocabulary = vocabulary

    @property
    def num_bytes(self) -> int:
        return self.base.num_bytes + 4 * self.vocabulary.vocab_size

    def matcher(self) -> DistinctMatcher:
        return DistinctMatcher(self, self.base.matcher())

    @cached_property
    def ending(self) -> MaskRow:
        """Tokens that may end an item: bits as in a mask."""
        return self.vocabulary.holding(b'",]}')

    @cached_property
    def quoting(self) -> MaskRow:
        """Tokens that may end a string."""
        return self.vocabulary.holding(b'"')

    @cached_property
    def opening(self) -> MaskRow:
        """Tokens that may open an array, which is refused where its items could not differ."""
        return self.vocabulary.holding(b"[")


class DistinctMatcher:
    """One sequence: see `graftlm.core.grammar.matcher.Matcher`."""

    __slots__ = ("_base", "_cursor", "_ending", "_grammar", "_history")

    def __init__(self, grammar: DistinctGrammar, base: Matcher) -> None:
        self._grammar = grammar
        self._base = base
        self._cursor = Cursor()
        self._history: list[Cursor] = []
        self._ending: tuple[int, list[int]] | None = None  # after how many tokens, and what

    def fill_mask(self, row: MaskRow) -> bool:
        if not self._base.fill_mask(row):
            row[:] = -1
        tokens, items, cursor = self._grammar.vocabulary.tokens, self._grammar.items, self._cursor
        for token_id in self._doubtful(row):
            data = tokens[token_id]
            if data and items.advance(cursor, data) is None:
                row.view(np.uint32)[token_id >> 5] &= np.uint32(~(1 << (token_id & 31)) & 0xFFFFFFFF)
        return True

    def _doubtful(self, row: MaskRow) -> list[int]:
        """Allowed tokens that may repeat an item, or leave it no other way."""
        grammar, cursor = self._grammar, self._cursor
        if not cursor.is_watching:
            in_string = cursor.mode in (STRING, ESCAPE, KEY_STRING, KEY_ESCAPE)
            return _ids(row & grammar.opening & grammar.quoting if in_string else row & grammar.opening)
        allowed = _ids(row)
        if len(allowed) <= _FEW:
            return allowed
        if not grammar.items.may_run_out(cursor):
            return _ids(row & (grammar.quoting if cursor.mode in (STRING, ESCAPE) else grammar.ending))
        return allowed

    def advance(self, token_ids: Sequence[int]) -> int:
        tokens = self._grammar.vocabulary.tokens
        for num_consumed, token_id in enumerate(token_ids):
            known = 0 <= token_id < len(tokens)
            after = self._cursor
            if known and tokens[token_id] and self._base.advance([token_id]) == 1:
                found = self._grammar.items.advance(self._cursor, tokens[token_id])
                if found is None:
                    self._base.rollback(1)
                    return num_consumed
                after = found
            elif not known or tokens[token_id] or self._base.advance([token_id]) != 1:
                return num_consumed
            self._history.append(self._cursor)
            self._cursor = after
            self._ending = None
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        self._base.rollback(num_tokens)
        if num_tokens:
            self._cursor = self._history[-num_tokens]
            del self._history[-num_tokens:]
            self._ending = None

    def fork(self) -> DistinctMatcher:
        twin = DistinctMatcher(self._grammar, self._base.fork())
        twin._cursor, twin._history, twin._ending = self._cursor, self._history.copy(), self._ending
        return twin

    def forced(self, context: Sequence[int]) -> list[int]:
        found = self._base.forced(context)
        num_kept = self.advance(found)
        self.rollback(num_kept)
        return found[:num_kept]

    def forced_bytes(self) -> bytes:
        return self._base.forced_bytes()

    def min_tokens_to_accept(self) -> int:
        return 0 if self.accepting else len(self._find_ending())

    def ending(self, context: Sequence[int]) -> list[int]:
        return [] if self.accepting else list(self._find_ending())

    def _find_ending(self) -> list[int]:
        if self._ending is None or self._ending[0] != len(self._history):
            self._ending = (len(self._history), self._search())
        return self._ending[1]

    def _search(self) -> list[int]:
        """The base's ending, once it repeats no item; until then the token that brings it nearest."""
        probe, found = self.fork(), list[int]()
        row = np.zeros(self._grammar.vocabulary.num_words, np.int32)
        deadline = time.monotonic() + _MAX_SECONDS
        while len(found) < _MAX_STEPS and time.monotonic() < deadline:
            ending = probe._base.ending([])
            num_kept = probe.advance(ending)
            if num_kept == len(ending) and probe.accepting:
                return found + ending
            if num_kept and (other := probe._other_item()) is not None:
                found += ending[:num_kept] + other
                continue
            probe.rollback(num_kept)
            if (fresh := probe._fresh_ending()) is not None:
                return found + fresh
            probe.fill_mask(row)
            token_id = probe._nearest(_ids(row))
            if token_id is None or probe.advance([token_id]) != 1:
                return []
            found.append(token_id)
        return []

    def _other_item(self) -> list[int] | None:
        """The rest of a string or name that is not there yet, where they have to differ; it is advanced over."""
        if self._cursor.mode not in (STRING, KEY_STRING):
            return None
        for data in self._grammar.items.others(self._cursor):
            ids = self._grammar.vocabulary.encode(data)
            if (num_kept := self.advance(ids)) == len(ids):
                return ids
            self.rollback(num_kept)
        return None

    def _fresh_ending(self) -> list[int] | None:
        """The base's ending after a few bytes that make the item at hand another one; the shortest of those tried."""
        best: list[int] | None = None
        for data in self._grammar.items.fresh(self._cursor):
            ids = self._grammar.vocabulary.encode(data)
            probe = self.fork()
            if best is not None and len(ids) >= len(best) or probe.advance(ids) != len(ids):
                continue
            ending = probe._base.ending([])
            if probe.advance(ending) == len(ending) and probe.accepting:
                best = min(ids + ending, best or ids + ending, key=len)
        return best

    def _nearest(self, allowed: list[int]) -> int | None:
        tokens = self._grammar.vocabulary.tokens
        best: tuple[int, int] | None = None
        for token_id in sorted((i for i in allowed if tokens[i]), key=lambda i: len(tokens[i]))[:_MAX_TRIED]:
            if self.advance([token_id]):
                left = (self._base.min_tokens_to_accept(), token_id)
                best = left if best is None else min(best, left)
                self.rollback(1)
        return None if best is None else best[1]

    @property
    def accepting(self) -> bool:
        return self._base.accepting

    @property
    def finished(self) -> bool:
        return self._base.finished

    @property
    def state(self) -> int | None:
        return None


def _ids(row: MaskRow) -> list[int]:
    found: list[int] = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
    return found
