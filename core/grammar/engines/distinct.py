"""Another engine's grammar in which items of arrays must differ: its masks without the tokens that would repeat one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from graftlm.core.grammar.automata.dfa import Place
from graftlm.core.grammar.engines.automaton import AutomatonMatcher
from graftlm.core.grammar.engines.distinct_endings import EndingSearch
from graftlm.core.grammar.matcher import MaskRow, Matcher
from graftlm.core.grammar.schema.cursor import ESCAPE, KEY_ESCAPE, KEY_STRING, STRING, Cursor
from graftlm.core.grammar.schema.distinct.distinct_items import DistinctItems
from graftlm.core.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    from graftlm.core.grammar.compile import EngineGrammar

_FEW = 2_048  # so many tokens are looked at one by one
_FEW_DOUBTFUL = 100
"""So many tokens are looked at one by one for whether the text can end after them."""
_LOOK_AHEAD = 300
"""Tokens that a search tries after each of these."""
_MAX_REMEMBERED = 1 << 13
_UNUSUAL = b"\\ \t\r\n"
"""Signs of other spellings of a text."""


class DistinctGrammar:
    """A grammar of JSON text, and the arrays in it whose items must differ."""

    def __init__(self, base: EngineGrammar, items: DistinctItems, vocabulary: Vocabulary) -> None:
        self.base = base
        self.items = items
        self.vocabulary = vocabulary
        self.endings: dict[tuple[Place, Cursor], list[int] | None] = {}
        """How the text ends from places that were looked at ahead."""

    @property
    def num_bytes(self) -> int:
        return self.base.num_bytes + 4 * self.vocabulary.vocab_size

    def matcher(self) -> DistinctMatcher:
        return DistinctMatcher(self, self.base.matcher())

    @property
    def can_end(self) -> bool:
        """Whether a text is found, where that is in doubt."""
        return not self.items.may_lack_endings or self.matcher().find_ending() is not None

    @cached_property
    def ending(self) -> MaskRow:
        """Tokens that may end an item: bits as in a mask."""
        return self.vocabulary.holding(b'",]}')

    @cached_property
    def quoting(self) -> MaskRow:
        """Tokens that may end a string."""
        return self.vocabulary.holding(b'"')

    @cached_property
    def marks(self) -> MaskRow:
        """Tokens that may begin or end an item or a name."""
        return self.vocabulary.holding(b'",:[]{}')

    @cached_property
    def opening(self) -> MaskRow:
        """Tokens that may open an array, which is refused where its items could not differ."""
        return self.vocabulary.holding(b"[")

    @cached_property
    def opening_any(self) -> MaskRow:
        """Tokens that may open an array or an object."""
        return self.vocabulary.holding(b"[{")


class DistinctMatcher:
    """One sequence: see `graftlm.core.grammar.matcher.Matcher`."""

    __slots__ = ("_after", "_base", "_cursor", "_ending", "_grammar", "_history")

    def __init__(self, grammar: DistinctGrammar, base: Matcher) -> None:
        self._grammar = grammar
        self._base = base
        self._cursor = Cursor()
        self._history: list[tuple[Cursor, list[int] | None]] = []  # places, and endings that were found there
        self._ending: list[int] | None = None
        self._after: dict[int, list[int] | None] = {}  # how the text ends after a token that comes next

    def fill_mask(self, row: MaskRow) -> bool:
        if not self._base.fill_mask(row):
            row[:] = -1
        grammar, cursor = self._grammar, self._cursor
        tokens, items = grammar.vocabulary.tokens, grammar.items
        places: dict[int, Cursor] = {}
        for token_id in self._doubtful(row):
            data = tokens[token_id]
            after = items.advance(cursor, data) if data else cursor
            if after is None:
                _clear(row, token_id)
            else:
                places[token_id] = after
        self._clear_dead_ends(row, places)
        return True

    def _clear_dead_ends(self, row: MaskRow, places: dict[int, Cursor]) -> None:
        """Clear the tokens after which no way to end the text is found; `places` are those after some of them."""
        if not self._after and (looked_after := self._looked_after(row, places)):
            known, probe = self.find_ending(), self.fork()
            for token_id in looked_after:
                if known and token_id == known[0]:
                    self._after[token_id] = known[1:]
                elif probe.step([token_id]):
                    self._after[token_id] = probe.ending_ahead()
                    probe.rollback(1)
        for token_id, ending in self._after.items():
            if ending is None:
                _clear(row, token_id)

    def _looked_after(self, row: MaskRow, places: dict[int, Cursor]) -> list[int]:
        """The tokens after which the text might not end; in a text of many characters only those that end it."""
        grammar, tokens, cursor, items = (
            self._grammar,
            self._grammar.vocabulary.tokens,
            self._cursor,
            self._grammar.items,
        )
        if items.is_doubtful(cursor):
            allowed = _ids(row)
            if len(allowed) > _FEW_DOUBTFUL:
                near = self._near(row, items.next_of_repeats(cursor))
                in_string = cursor.mode in (STRING, ESCAPE, KEY_STRING, KEY_ESCAPE)
                allowed = list(dict.fromkeys([*near, *_ids(row & (grammar.quoting if in_string else grammar.marks))]))
            return [token_id for token_id in allowed if tokens[token_id]]
        allowed = _ids(self._opening(row)) if cursor.is_watching else list(places)
        if items.may_be_stuck(cursor):
            allowed = list(dict.fromkeys([*allowed, *self._repeating(row)]))
        after = ((token_id, places.get(token_id) or items.advance(cursor, tokens[token_id])) for token_id in allowed)
        return [token_id for token_id, place in after if place is not None and items.may_be_stuck(place)]

    def _repeating(self, row: MaskRow) -> list[int]:
        """Those of `row` that may go on to repeat an item; of many in a text only those that end it."""
        grammar, tokens, cursor = self._grammar, self._grammar.vocabulary.tokens, self._cursor
        next_texts = grammar.items.next_of_repeats(cursor)
        allowed, near = _ids(row), list[int]()
        if len(allowed) > _FEW_DOUBTFUL:
            near = self._near(row, next_texts)
            in_string = cursor.mode in (STRING, ESCAPE, KEY_STRING, KEY_ESCAPE)
            allowed = _ids(row & (grammar.quoting if in_string else grammar.marks))
        usual = tuple(next_texts)
        return near + [
            token_id
            for token_id in allowed
            if (data := tokens[token_id])
            and (data.startswith(usual) or any(sign in data for sign in _UNUSUAL) or _is_beginning(data, usual))
        ]

    def _near(self, row: MaskRow, texts: Iterable[bytes]) -> list[int]:
        """Those of `row` with which one of `texts` begins."""
        trie = self._grammar.vocabulary.trie
        ends = {text[:end] for text in texts for end in range(1, min(len(text), trie.max_depth) + 1)}
        found = [(data, trie.longest_prefix(data)) for data in ends]
        ids = [
            token_id
            for data, token_id in found
            if token_id is not None and self._grammar.vocabulary.tokens[token_id] == data
        ]
        return [token_id for token_id in ids if row[token_id >> 5] >> (token_id & 31) & 1]

    def _opening(self, row: MaskRow) -> MaskRow:
        """Those of `row` that may open an array; where one is watched, also an object in it."""
        is_watching = self._cursor.is_watching
        opening = row & (self._grammar.opening_any if is_watching else self._grammar.opening)
        in_string = self._cursor.mode in (STRING, ESCAPE, KEY_STRING, KEY_ESCAPE)
        return opening & self._grammar.quoting if in_string else opening

    def ending_ahead(self) -> list[int] | None:
        """An ending from here, as a token is looked at that leads here: sooner given up, and remembered."""
        place = self._base.place if isinstance(self._base, AutomatonMatcher) else None
        if place is None:
            return EndingSearch(self, _LOOK_AHEAD).find()
        known, key = self._grammar.endings, (place, self._cursor)
        try:
            return known[key]
        except KeyError:
            if len(known) >= _MAX_REMEMBERED:
                known.clear()
            found = known[key] = EndingSearch(self, _LOOK_AHEAD).find()
            return found

    def _doubtful(self, row: MaskRow) -> list[int]:
        """Allowed tokens that may repeat an item, or leave it no other way."""
        grammar, cursor = self._grammar, self._cursor
        if not cursor.is_watching:
            return _ids(self._opening(row))
        allowed = _ids(row)
        if len(allowed) <= _FEW:
            return allowed
        if not grammar.items.may_run_out(cursor):
            return _ids(row & (grammar.quoting if cursor.mode in (STRING, ESCAPE) else grammar.ending))
        return allowed

    def advance(self, token_ids: Sequence[int]) -> int:
        num_consumed = self.step(token_ids)
        items = self._grammar.items
        while num_consumed and items.may_be_stuck(self._cursor) and self.find_ending() is None:
            self.rollback(1)
            num_consumed -= 1
            if self._is_in_mask(token_ids[num_consumed]):  # too many were allowed for each to be looked at
                self.step([token_ids[num_consumed]])
                return num_consumed + 1
        return num_consumed

    def _is_in_mask(self, token_id: int) -> bool:
        row = np.zeros(self._grammar.vocabulary.num_words, np.int32)
        self.fill_mask(row)
        return bool(row[token_id >> 5] >> (token_id & 31) & 1)

    def step(self, token_ids: Sequence[int]) -> int:
        """Consume tokens up to the first that the base does not allow or that repeats an item, whatever follows."""
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
            self._history.append((self._cursor, self._ending))
            self._cursor = after
            self._move(token_id)
        return len(token_ids)

    def _move(self, token_id: int) -> None:
        """Forget what is known of the place before; what follows `token_id` may be known from there."""
        known = self._after.get(token_id)
        if known is None and self._ending and self._ending[0] == token_id:
            known = self._ending[1:]
        self._ending, self._after = known, {}

    def rollback(self, num_tokens: int) -> None:
        self._base.rollback(num_tokens)
        if num_tokens:
            self._cursor, self._ending = self._history[-num_tokens]
            self._after = {}
            del self._history[-num_tokens:]

    def fork(self) -> DistinctMatcher:
        twin = DistinctMatcher(self._grammar, self._base.fork())
        twin._cursor, twin._history, twin._ending = self._cursor, self._history.copy(), self._ending
        twin._after = self._after.copy()
        return twin

    def forced(self, context: Sequence[int]) -> list[int]:
        found = self._base.forced(context)
        num_kept = self.advance(found)
        self.rollback(num_kept)
        return found[:num_kept]

    def forced_bytes(self) -> bytes:
        return self._base.forced_bytes()

    def min_tokens_to_accept(self) -> int:
        return len(self.find_ending() or [])

    def ending(self, context: Sequence[int]) -> list[int]:
        return list(self.find_ending() or [])

    def find_ending(self) -> list[int] | None:
        """The shortest ending that is found; None if none is."""
        if self.accepting:
            return []
        if self._ending is None:
            self._ending = EndingSearch(self.fork()).find()
        return self._ending

    def num_items(self) -> list[int]:
        """How many items, or names that must differ, there are in each open array and object, the outermost first."""
        return [max(frame.number, len(frame.seen)) for frame in self._cursor.frames]

    def base_ending(self) -> list[int]:
        return self._base.ending([])

    def plain_ending(self) -> list[int] | None:
        ending = self._base.ending([])
        tokens = self._grammar.vocabulary.tokens
        data = b"".join([tokens[token_id] for token_id in ending])
        return ending if ending and self._grammar.items.advance(self._cursor, data) is not None else None

    def base_distance(self) -> int:
        return self._base.min_tokens_to_accept()

    def other_items(self) -> Iterator[list[int]]:
        return map(self._grammar.vocabulary.encode, self._grammar.items.others(self._cursor))

    def fresh(self) -> Iterator[list[int]]:
        return map(self._grammar.vocabulary.encode, self._grammar.items.fresh(self._cursor))

    def allowed(self) -> list[int]:
        tokens, row = self._grammar.vocabulary.tokens, np.zeros(self._grammar.vocabulary.num_words, np.int32)
        if not self._base.fill_mask(row):
            row[:] = -1
        return sorted((token_id for token_id in _ids(row) if tokens[token_id]), key=lambda i: len(tokens[i]))

    @property
    def accepting(self) -> bool:
        return self._base.accepting

    @property
    def finished(self) -> bool:
        return self._base.finished


def _is_beginning(data: bytes, texts: tuple[bytes, ...]) -> bool:
    return any(text.startswith(data) for text in texts)


def _clear(row: MaskRow, token_id: int) -> None:
    row.view(np.uint32)[token_id >> 5] &= np.uint32(~(1 << (token_id & 31)) & 0xFFFFFFFF)


def _ids(row: MaskRow) -> list[int]:
    if not row.any():
        return []
    found: list[int] = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
    return found
