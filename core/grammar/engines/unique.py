"""Items, and names of members, that must differ: masks of another engine without tokens that complete a second equal
one, or that leave no way to complete an unequal one.

An item that is not yet apart from every item before it is compared byte by byte: a token may follow if some byte after
it, which the other engine allows, leads away from all of them.
"""

from __future__ import annotations

import json
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import count, islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from graftlm.core.grammar.matcher import NO_ENDING, MaskRow, Matcher
from graftlm.core.grammar.schema.text import json_text
from graftlm.core.grammar.schema.unique_items import Place, canonical
from graftlm.core.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    from graftlm.core.grammar.compile import EngineGrammar

VALUE, STRING, ESCAPE, SCALAR, AFTER, KEY, KEY_STRING, KEY_ESCAPE, COLON = range(9)
_MAX_ROWS = 256
_MAX_NAMES = 1_000
_ENDINGS_S = 1.0
"""Processor time in which one sequence searches endings without an equal item: each item may need a search."""
_BLANKS, _ENDS = b" \t\r\n", b",:]} \t\r\n"


class Seen:
    """The items of one array, or the names of one object, so far.

    texts   sorted: those in one spelling
    values  those that are compared by value
    """

    def __init__(self, texts: tuple[bytes, ...] = (), values: frozenset[str] = frozenset()) -> None:
        self.texts = texts
        self.values = values
        self.fresh: dict[bytes, bool] = {}
        """Whether a text that begins so can become one that is not in `texts`."""

    def with_text(self, text: bytes) -> Seen | None:
        """Return these and `text`; None if it is there."""
        place = bisect_left(self.texts, text)
        if self.texts[place : place + 1] == (text,):
            return None
        after = Seen((*self.texts[:place], text, *self.texts[place:]), self.values)
        after.fresh = {begun: False for begun, is_fresh in self.fresh.items() if not is_fresh}
        return after

    def with_value(self, text: bytes, until: tuple[str, ...] | None) -> Seen | None:
        """Return these and the value of `text`, as far as `until` compares it; None if it is there."""
        value = canonical(text, until)
        return None if value in self.values else Seen(self.texts, self.values | {value})

    def continuing(self, begun: bytes) -> tuple[bytes, ...]:
        """Return the texts that begin with `begun`."""
        first = bisect_left(self.texts, begun)
        return self.texts[first : bisect_left(self.texts, begun + b"\xff", first)]


class Frame(NamedTuple):
    """An open array or object.

    place  its place in the schema; None where nothing in it must differ
    inner  the place of the value, or of the member, that is next or open
    seen   the items or names so far, if they must differ
    start  byte of the cursor's text at which the open item or name begins; -1 between them
    is_pivot  whether the open member of an item is the last one that can make the item unequal
    """

    place: Place | None
    is_array: bool
    inner: Place | None
    seen: Seen | None = None
    start: int = -1
    is_pivot: bool = False

    def is_by_value(self, text: bytes) -> bool:
        """Return True if an item is open here that is compared by value."""
        if self.start < 0 or not self.is_array or self.place is None:
            return False
        return text[self.start] in self.place.by_value


class Cursor(NamedTuple):
    """A position in JSON text.

    mode    what may follow: VALUE to COLON
    frames  the open arrays and objects, the outermost first
    text    the bytes since the outermost open item began
    key     byte of `text` at which the open name begins; -1 outside of names
    """

    mode: int
    frames: tuple[Frame, ...]
    root: Place | None
    text: bytes = b""
    key: int = -1

    def step(self, data: bytes) -> Cursor | None:
        """Return the position after `data`, which the other engine allows; None if two items or names are equal."""
        mode, frames, key = self.mode, list(self.frames), self.key
        text = self.text + data
        for position in range(len(self.text), len(text)):
            byte = text[position]
            if mode in (STRING, KEY_STRING):
                if byte == 0x5C:
                    mode += 1
                elif byte == 0x22:
                    if not _close_text(frames, text[: position + 1], is_name=mode == KEY_STRING):
                        return None
                    if mode == KEY_STRING and not _open_member(frames, text, key, position + 1):
                        return None
                    mode, key = (AFTER, -1) if mode == STRING else (COLON, -1)
                continue
            if mode in (ESCAPE, KEY_ESCAPE):
                mode -= 1
                continue
            if mode == SCALAR:
                if byte not in _ENDS:
                    continue
                if not _close_text(frames, text[:position]):
                    return None
                mode = AFTER
            if byte in _BLANKS:
                continue
            if mode == KEY and byte == 0x22:
                mode, key = KEY_STRING, position
                if frames[-1].seen is not None:
                    frames[-1] = frames[-1]._replace(start=position)
            elif mode == COLON:
                mode = VALUE
            elif mode == VALUE and byte not in b"]":
                if frames and frames[-1].is_array and frames[-1].seen is not None:
                    frames[-1] = frames[-1]._replace(start=position)
                if byte in b"[{":
                    frames.append(_opened(frames[-1].inner if frames else self.root, byte == 0x5B))
                    mode = VALUE if byte == 0x5B else KEY
                else:
                    mode = STRING if byte == 0x22 else SCALAR
            elif byte == 0x2C:
                mode = VALUE if frames[-1].is_array else KEY
            else:  # a closing bracket
                frames.pop()
                mode = AFTER
                if not _close_text(frames, text[: position + 1]):
                    return None
        if mode in (KEY_STRING, KEY_ESCAPE) and not _may_name(frames, text, key):
            return None
        if key < 0 and all(frame.start < 0 for frame in frames):
            text = b""
        return Cursor(mode, tuple(frames), self.root, text, key)

    @property
    def open_item(self) -> tuple[Seen, bytes] | None:
        """The items that the open, or next, item or name must differ from, and its bytes so far; None if there are
        none, or if one more member makes it differ.
        """
        for depth in range(len(self.frames) - 1, -1, -1):
            frame = self.frames[depth]
            if frame.seen is None:
                continue
            if frame.start >= 0:
                if not frame.is_by_value(self.text):
                    return frame.seen, self.text[frame.start :]
            elif depth == len(self.frames) - 1 and self.mode == (VALUE if frame.is_array else KEY):
                return frame.seen, b""
        return None

    @property
    def is_compared_by_value(self) -> bool:
        """Whether an item is open that is compared with others by value."""
        return any(frame.is_by_value(self.text) and frame.seen and frame.seen.values for frame in self.frames)


def _open_member(frames: list[Frame], text: bytes, key: int, end: int) -> bool:
    """Enter the member whose name is text[key:end]; False if it is one after the pivot of an item still equal."""
    top = frames[-1]
    name = json.loads(text[key:end]) if top.place is not None or len(frames) > 1 else ""
    until = _compared_members(frames, text)
    if until is not None and name not in until and _equals_one(frames, text[:key]):
        return False
    inner = None if top.place is None else top.place.member(name)
    frames[-1] = top._replace(inner=inner, is_pivot=until is not None and name == until[-1])
    return True


def _compared_members(frames: list[Frame], text: bytes) -> tuple[str, ...] | None:
    """The names of the members by which the innermost object is compared as an item, if not by all of them."""
    if len(frames) < 2 or frames[-1].is_array or not frames[-2].is_by_value(text):
        return None
    place = frames[-2].place
    return None if place is None else place.until


def _equals_one(frames: list[Frame], text: bytes) -> bool:
    """Return True if the innermost object, an item, equals one before in the members that it has so far."""
    array, until = frames[-2], _compared_members(frames, text)
    begun = text[array.start :].rstrip(b", \t\r\n") + b"}"
    return array.seen is not None and bool(array.seen.values) and canonical(begun, until) in array.seen.values


def _may_name(frames: list[Frame], text: bytes, key: int) -> bool:
    """Return False if the name that begins at `key` is one after the pivot of an item that still equals one before."""
    until = _compared_members(frames, text)
    if until is None or not _equals_one(frames, text[:key]):
        return True
    written = json.loads(text[frames[-2].start : key].rstrip(b", \t\r\n") + b"}")
    left = until[1 + max((until.index(name) for name in written if name in until), default=-1) :]
    return any(json_text.string_bytes(name).startswith(text[key:]) for name in left)


def _opened(place: Place | None, is_array: bool) -> Frame:
    if place is None:
        return Frame(None, is_array, None)
    must_differ = place.unique if is_array else place.names
    return Frame(place, is_array, place.items if is_array else None, Seen() if must_differ else None)


def _close_text(frames: list[Frame], text: bytes, *, is_name: bool = False) -> bool:
    """Add the item or name that ends with `text` to those of its array or object; False if it is there."""
    top = frames[-1] if frames else None
    if top is not None and top.is_pivot and not is_name:
        if _equals_one(frames, text):
            return False
        frames[-1] = top = top._replace(is_pivot=False)
    if top is None or top.seen is None or top.start < 0 or top.is_array == is_name:
        return True
    item = text[top.start :]
    until = None if top.place is None else top.place.until
    seen = top.seen.with_value(item, until) if top.is_by_value(text) else top.seen.with_text(item)
    if seen is None:
        return False
    frames[-1] = top._replace(seen=seen, start=-1)
    return True


class UniqueGrammar:
    """A grammar of JSON text, and the place of its whole text."""

    def __init__(self, base: EngineGrammar, root: Place, vocabulary: Vocabulary) -> None:
        self.base = base
        self.root = root
        self.vocabulary = vocabulary
        self._beginning: dict[frozenset[int], MaskRow] = {}

    @property
    def num_bytes(self) -> int:
        return self.base.num_bytes

    def matcher(self) -> UniqueMatcher:
        return UniqueMatcher(self, self.base.matcher(), Cursor(VALUE, (), self.root))

    @cached_property
    def byte_ids(self) -> list[int]:
        """The token of each single byte."""
        found = {token[0]: token_id for token_id, token in enumerate(self.vocabulary.tokens) if len(token) == 1}
        return [found[byte] for byte in range(256)]

    @cached_property
    def _first_bytes(self) -> MaskRow:
        """The first byte of each token; -1 for a token without bytes."""
        tokens = self.vocabulary.tokens
        return np.fromiter((token[0] if token else -1 for token in tokens), np.int32, len(tokens))

    def beginning(self, firsts: frozenset[int]) -> MaskRow:
        """Return the tokens that begin with one of these bytes, as a mask row."""
        found = self._beginning.get(firsts)
        if found is None:
            bits = np.zeros(32 * self.vocabulary.num_words, np.uint8)
            bits[: len(self.vocabulary.tokens)] = np.isin(self._first_bytes, list(firsts))
            found = self._beginning[firsts] = np.packbits(bits, bitorder="little").view(np.int32)
            if len(self._beginning) > _MAX_ROWS:
                self._beginning.clear()
        return found


class UniqueMatcher:
    """One sequence: see `graftlm.core.grammar.matcher.Matcher`."""

    __slots__ = ("_base", "_cursor", "_ending", "_grammar", "_history", "_known", "_spent_s")

    def __init__(self, grammar: UniqueGrammar, base: Matcher, cursor: Cursor) -> None:
        self._grammar = grammar
        self._base = base
        self._cursor = cursor
        self._history: list[Cursor] = []
        self._ending: list[int] | None = None
        self._known: tuple[int, list[int]] = (-1, [])  # tokens before this one, and the ending that was found there
        self._spent_s = 0.0

    def fill_mask(self, row: MaskRow) -> bool:
        if not self._base.fill_mask(row):
            row[:] = -1
        tokens = self._grammar.vocabulary.tokens
        for token_id in self._candidates(row):
            after = self._cursor.step(tokens[token_id])
            if after is None or not self._can_follow(token_id, after):
                row.view(np.uint32)[token_id >> 5] &= np.uint32(~(1 << (token_id & 31)) & 0xFFFFFFFF)
        return True

    def _candidates(self, row: MaskRow) -> Iterator[int]:
        """Yield the tokens of `row` that might complete an equal item, or leave none that is unequal."""
        grammar, cursor = self._grammar, self._cursor
        vocabulary, tokens = grammar.vocabulary, grammar.vocabulary.tokens
        is_open = any(frame.seen is not None for frame in cursor.frames)
        in_string = cursor.mode in (STRING, ESCAPE, KEY_STRING, KEY_ESCAPE)
        several = row & vocabulary.holding(b",")
        if in_string:
            several = several & vocabulary.holding(b'"')
        if not is_open:
            several = several & vocabulary.holding(b"[{")
        found = dict.fromkeys(_ids(several))
        if cursor.is_compared_by_value:
            found.update(dict.fromkeys(_ids(row & vocabulary.holding(b'"' if in_string else b'"}]'))))
            if cursor.mode == KEY_STRING:
                found.update(dict.fromkeys(_ids(row)[:_MAX_NAMES]))
        if (item := cursor.open_item) is not None and (same := item[0].continuing(item[1])):
            begun = item[1]
            rests = tuple([text[len(begun) :] for text in same if text != begun])
            firsts = {rest[0] for rest in rests}
            if begun in same or not begun:
                firsts.update(_ENDS)
            longest = vocabulary.trie.max_depth
            parts = {rest[:end] for rest in rests for end in range(1, min(len(rest), longest) + 1)}
            near = _ids(row & grammar.beginning(frozenset(firsts)))
            found.update(
                (i, None) for i in near if tokens[i][0] in _ENDS or tokens[i] in parts or tokens[i].startswith(rests)
            )
        return iter([token_id for token_id in found if tokens[token_id]])

    def _can_follow(self, token_id: int, after: Cursor) -> bool:
        """Return True if the other engine can complete an unequal item after the token, which leads to `after`."""
        item = after.open_item
        if item is None or not item[0].continuing(item[1]):
            return True
        if self._base.advance([token_id]) != 1:
            return False
        try:
            return self._is_fresh(after)
        finally:
            self._base.rollback(1)

    def _is_fresh(self, cursor: Cursor) -> bool:
        """Return True if the open item of `cursor`, at which the other engine stands, can become an unequal one."""
        item = cursor.open_item
        if item is None:
            return True
        seen, begun = item
        if not seen.continuing(begun):
            return True
        if begun not in seen.fresh:
            top = cursor.frames[-1]
            endless = top.place.by_value if not begun and top.is_array and top.place is not None else b""
            seen.fresh[begun] = not self._bytes().isdisjoint(endless) or self._has_fresh(seen, begun)
        return seen.fresh[begun]

    def _has_fresh(self, seen: Seen, begun: bytes) -> bool:
        """Return True if a byte that the other engine allows somewhere after `begun` leads away from all of `seen`."""
        num_steps = 0
        try:
            while True:
                same = seen.continuing(begun)
                if not same:
                    return True
                allowed = self._bytes()
                if not begun:
                    blanks = allowed.intersection(_BLANKS)
                    allowed -= blanks
                    if not allowed:
                        num_steps += self._base.advance([self._grammar.byte_ids[min(blanks)]])
                        continue
                if begun in same:
                    if begun[0] in b'"[{tfn':
                        return False
                    allowed.difference_update(_ENDS)
                onward = {text[len(begun)] for text in same if len(text) > len(begun)}
                if not allowed <= onward:
                    return True
                if len(allowed) != 1:
                    return any(self._has_fresh_after(seen, begun + bytes([byte])) for byte in sorted(allowed))
                begun += bytes(allowed)
                num_steps += self._base.advance([self._grammar.byte_ids[begun[-1]]])
        finally:
            self._base.rollback(num_steps)

    def _has_fresh_after(self, seen: Seen, begun: bytes) -> bool:
        if begun not in seen.fresh:
            self._base.advance([self._grammar.byte_ids[begun[-1]]])
            seen.fresh[begun] = self._has_fresh(seen, begun)
            self._base.rollback(1)
        return seen.fresh[begun]

    def _bytes(self) -> set[int]:
        """Return the bytes that the other engine allows next."""
        row = np.zeros(self._grammar.vocabulary.num_words, np.int32)
        if not self._base.fill_mask(row):
            return set(range(256))
        ids = np.array(self._grammar.byte_ids)
        return set(np.flatnonzero(row[ids >> 5] >> (ids & 31) & 1).tolist())

    def advance(self, token_ids: Sequence[int]) -> int:
        tokens = self._grammar.vocabulary.tokens
        for num_consumed, token_id in enumerate(token_ids):
            if self._base.advance([token_id]) != 1:
                return num_consumed
            data = tokens[token_id]
            after = self._cursor.step(data) if data else self._cursor
            if after is None or data and not self._is_fresh(after):
                self._base.rollback(1)
                return num_consumed
            if self._ending is not None:
                self._known = (len(self._history), self._ending)
            self._history.append(self._cursor)
            self._cursor, self._ending = after, None
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        self._base.rollback(num_tokens)
        if num_tokens:
            self._cursor = self._history[-num_tokens]
            del self._history[-num_tokens:]
            num_known, ending = self._known
            self._ending = ending if num_known == len(self._history) else None

    def fork(self) -> UniqueMatcher:
        twin = UniqueMatcher(self._grammar, self._base.fork(), self._cursor)
        twin._history, twin._ending = self._history.copy(), self._ending
        twin._known, twin._spent_s = self._known, self._spent_s
        return twin

    def forced(self, context: Sequence[int]) -> list[int]:
        found = self._base.forced(context)
        num_kept = self.advance(found)
        self.rollback(num_kept)
        return found[:num_kept]

    def forced_bytes(self) -> bytes:
        return self._base.forced_bytes()

    def min_tokens_to_accept(self) -> int:
        found = self.ending(())
        return len(found) if found or self.accepting else NO_ENDING

    def ending(self, context: Sequence[int]) -> list[int]:
        """Return the tokens of the other engine's ending, with bytes in between where it would repeat an item.

        [] where the other engine finds none, or the searches for one have taken _ENDINGS_S.
        """
        if self._ending is None:
            base = self._base.ending(context)
            data = self._grammar.vocabulary.decode(base)
            is_usual = self.accepting or self._cursor.step(data) is not None
            self._ending = base if is_usual else self._grammar.vocabulary.encode(self._search())
        return list(self._ending)

    def _search(self) -> bytes:
        began_s = time.thread_time()
        try:
            return self.fork()._unequal_ending(began_s + _ENDINGS_S - self._spent_s)
        finally:
            self._spent_s += time.thread_time() - began_s

    def _unequal_ending(self, until_s: float) -> bytes:
        """Return bytes to an accepting state, and go there; none where the other engine finds no ending.

        until_s  processor time of this thread after which none is found
        """
        grammar, names = self._grammar, count()
        data = b""
        while not self.accepting:
            rest = b"" if time.thread_time() >= until_s else grammar.vocabulary.decode(self._base.ending(()))
            if not rest:
                return b""
            taken = self._step_bytes(rest)
            data += rest[:taken]
            if taken < len(rest):
                grows = rest[taken] == 0x7D and (self._cursor.mode == KEY or 0x2C in self._bytes())
                data += (self._new_member(names) if grows else b"") or self._another_byte()
        return data

    def _step_bytes(self, data: bytes) -> int:
        return self.advance([self._grammar.byte_ids[byte] for byte in data])

    def _new_member(self, names: Iterator[int]) -> bytes:
        """Begin a member with a new name in the innermost object, and return its bytes, or none."""
        for number in islice(names, _MAX_NAMES):
            data = b'"%d":' % number if self._cursor.mode == KEY else b',"%d":' % number
            taken = self._step_bytes(data)
            if taken == len(data):
                return data
            self.rollback(taken)
            if taken <= 2:  # no name begins with a digit
                break
        return b""

    def _another_byte(self) -> bytes:
        """Take a byte, if possible one that leads away from all items before, and return it."""
        item = self._cursor.open_item
        begun = b"" if item is None else item[1]
        onward = set() if item is None else {text[len(begun)] for text in item[0].continuing(begun) if text != begun}
        for byte in sorted(self._bytes(), key=lambda byte: (byte in onward, byte > 127, not chr(byte).isalnum(), byte)):
            if self._step_bytes(bytes([byte])):
                return bytes([byte])
        raise AssertionError("no byte may follow, though an unequal item can")

    @property
    def accepting(self) -> bool:
        return self._base.accepting

    @property
    def finished(self) -> bool:
        return self._base.finished


def _ids(row: MaskRow) -> list[int]:
    if not row.any():
        return []
    found: list[int] = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
    return found
