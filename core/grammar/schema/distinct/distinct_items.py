"""`uniqueItems`: follows JSON text as it is written, and says whether an item equals one before it, or has to.

The same of the names of members, where an object counts names that its schema does not list.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import repeat
from typing import TYPE_CHECKING

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.schema.algebra.kinds import tells_kinds_apart
from graftlm.core.grammar.schema.algebra.needed_values import MAX_PLACES, needed_values
from graftlm.core.grammar.schema.algebra.shape_algebra import ShapeAlgebra
from graftlm.core.grammar.schema.algebra.shapes import (
    ANYTHING,
    NOTHING,
    Array,
    Both,
    ExactlyOne,
    Implied,
    Not,
    Object,
    Reference,
    Shape,
    Union,
    both,
    item_at,
    union,
)
from graftlm.core.grammar.schema.cursor import (
    AFTER,
    COLON,
    ESCAPE,
    KEY,
    KEY_ESCAPE,
    KEY_STRING,
    SCALAR,
    STRING,
    VALUE,
    Containers,
    Cursor,
    Frame,
    Seen,
)
from graftlm.core.grammar.schema.distinct.begun_value import next_texts
from graftlm.core.grammar.schema.distinct.doubtful_items import DoubtfulItems
from graftlm.core.grammar.schema.distinct.fresh_bytes import fresh_bytes
from graftlm.core.grammar.schema.distinct.item_language import ItemLanguage
from graftlm.core.grammar.schema.distinct.item_languages import ItemLanguages, Way, item_of
from graftlm.core.grammar.schema.member_names import counts_names, name_language
from graftlm.core.grammar.schema.spelling import one_spelling
from graftlm.core.grammar.schema.text.items import merged

if TYPE_CHECKING:
    from graftlm.core.grammar.ast import Node

_BLANKS, _ENDS = b" \t\r\n", b",]} \t\r\n"
_QUOTE, _BACKSLASH, _OPEN, _CLOSE, _OPEN_OBJECT, _CLOSE_OBJECT, _COMMA = b'"\\[]{},'


class DistinctItems:
    """The arrays of one schema whose items must differ.

    lower  gives the language of an item, None if not regular
    closed  gives the parts of an object without the members that strict mode leaves out
    close  lets go of what algebra and `lower` hold; called once this object is gone
    """

    def __init__(
        self,
        root: Shape,
        algebra: ShapeAlgebra,
        lower: Callable[[Shape], Node | None],
        closed: Callable[[tuple[Shape, ...]], tuple[Shape, ...]],
        close: Callable[[], None],
    ) -> None:
        algebra.forget_ways()
        self._algebra = algebra
        self._items_of = ItemLanguages(algebra, lower)
        self._closed = closed
        self._members: dict[tuple[Containers, str], Containers] = {}
        self._items: dict[tuple[Containers, int], Containers] = {}
        self._names: dict[tuple[tuple[Object, ...], bool, bool], ItemLanguage | None] = {}
        self._ways: dict[Shape, list[Way]] = {}
        self._open: tuple[Containers, int, Seen, list[ItemLanguage | None]] | None = None  # of the latest place
        self._needed: tuple[Frame, Seen] | None = None  # of the latest item
        self._excluded: set[Object | Array] = set()  # what some value must not be: its parts may exclude or ask
        self._doubtful = DoubtfulItems(root, algebra, closed)
        self.may_lack_values = self._doubtful.may_lack_values()
        """Whether what is allowed next may leave no way to end the text, wherever that is."""
        self.may_lack_endings = self.may_lack_values or self._doubtful.are_anywhere
        """Whether there may be texts of which no ending is found."""
        self._root = self._containers([(root, True, True)])
        weakref.finalize(self, close).atexit = False

    def advance(self, cursor: Cursor, data: bytes) -> Cursor | None:
        """The place after `data`, which the schema allows but for equal items; None if two items would be equal."""
        mode, frames, key = cursor.mode, list(cursor.frames), cursor.key
        text = cursor.text + data
        position = len(cursor.text)
        while position < len(text):
            byte = text[position]
            if mode in (STRING, KEY_STRING):
                if byte == _BACKSLASH:
                    mode += 1
                elif byte == _QUOTE and mode == STRING:
                    mode = AFTER
                    if not self._complete(frames, text, position + 1):
                        return None
                elif byte == _QUOTE:
                    if not self._complete(frames, text, position + 1):
                        return None
                    top = frames[-1]
                    if top.shapes.parts:
                        name = json.loads(text[key : position + 1])
                        frames[-1] = top._replace(inner=self._member(top.shapes, name))
                    mode, key = COLON, -1
            elif mode in (ESCAPE, KEY_ESCAPE):
                mode -= 1
            elif mode == SCALAR and byte not in _ENDS or byte in _BLANKS and mode != SCALAR:
                pass
            elif mode == VALUE and byte != _CLOSE:
                if frames and frames[-1].unique and frames[-1].is_array:
                    frames[-1] = frames[-1]._replace(start=position)
                inner = frames[-1].inner if frames else self._root
                if byte in (_OPEN, _OPEN_OBJECT):
                    frames.append(self._frame(inner, byte == _OPEN))
                    mode = VALUE if byte == _OPEN else KEY
                else:
                    mode = STRING if byte == _QUOTE else SCALAR
            elif mode == KEY and byte == _QUOTE:
                mode, key = KEY_STRING, position
                if frames[-1].unique:
                    frames[-1] = frames[-1]._replace(start=position)
            elif mode == COLON:
                mode = VALUE
            else:
                if mode == SCALAR and not self._complete(frames, text, position):
                    return None
                mode = AFTER
                if byte == _COMMA:
                    mode = self._next(frames)
                elif byte in (_CLOSE, _CLOSE_OBJECT):
                    frames.pop()
                    if not self._complete(frames, text, position + 1):
                        return None
            position += 1
        after = Cursor(mode, tuple(frames), text, key)
        if not after.is_watching and key < 0:
            return after._replace(text=b"")
        return after if self._can_differ(after) else None

    def may_run_out(self, cursor: Cursor) -> bool:
        """Whether the item at hand may come where it has only so many ways to differ from those before."""
        return any(
            language.may_run_out(cursor.text[frame.start :] if frame.start >= 0 else b"")
            for frame in cursor.frames
            if frame.unique and self._taken(frame)
            for language in self._languages_of(frame)
            if language is not None
        )

    def may_be_stuck(self, cursor: Cursor) -> bool:
        """Whether there may be no way to end the text at this place."""
        return self.is_doubtful(cursor) or any(map(self._next_texts, repeat(cursor), cursor.frames))

    def is_doubtful(self, cursor: Cursor) -> bool:
        """Whether there may be none whatever the items at hand become."""
        return self.may_lack_values or any(frame.doubtful for frame in cursor.frames)

    def next_of_repeats(self, cursor: Cursor) -> set[bytes]:
        """What may come next, in its usual spelling, where the item or name at hand is to be one before it.

        -> an empty text stands for any
        """
        begun = [(cursor.text[frame.start :], frame) for frame in cursor.frames if frame.unique and frame.start >= 0]
        found = {text[len(data) :] for data, frame in begun for text, _ in frame.seen if text.startswith(data)}
        return found.union(text.encode() for _, frame in begun for text in self._next_texts(cursor, frame))

    def _next_texts(self, cursor: Cursor, frame: Frame) -> set[str]:
        """The same for the array or object at hand in an array."""
        if not (frame.unique and frame.is_array and frame.start >= 0 and cursor.text[frame.start] in b"[{"):
            return set()
        begun = cursor.text[frame.start :]
        return set().union(*(next_texts(begun, value) for _, value in self._taken(frame)))

    def fresh(self, cursor: Cursor) -> Iterator[bytes]:
        """What may come next so that the item at hand differs from those before, if the schema allows it."""
        yield from self.others(cursor)
        yield from fresh_bytes(cursor)

    def others(self, cursor: Cursor) -> Iterator[bytes]:
        """How the item or name at hand may go on so that it differs from those before, if the schema allows it."""
        top = cursor.frames[-1] if cursor.frames else None
        if top is None or not top.unique or cursor.mode not in (VALUE, STRING, SCALAR, KEY, KEY_STRING):
            return
        number = len(self._taken(top)) + 1
        begun = cursor.text[top.start :] if top.start >= 0 else b""
        if cursor.mode == KEY_STRING:
            yield from (b'%d"' % i for i in range(number))
        for language in self._languages_of(top):
            if language is not None:
                yield from filter(None, language.endings(begun, number))

    def _frame(self, shapes: Containers, is_array: bool) -> Frame:
        mine = tuple(shape for shape in shapes.parts if isinstance(shape, Array) == is_array)
        unique = any(shape.unique if isinstance(shape, Array) else counts_names(shape) for shape in mine)
        if unique and is_array and len(mine) > 1:
            unique = any(
                shape.unique and self._is_possible(shapes, shape) for shape in mine if isinstance(shape, Array)
            )
        shapes = Containers(mine, shapes.firm.intersection(mine), shapes.whole)
        inner = self._item(shapes, 0) if is_array else Containers()
        return Frame(is_array, shapes, inner, unique, doubtful=unique and is_array and self._doubtful.are_in(shapes))

    def _is_possible(self, shapes: Containers, shape: Array) -> bool:
        """Whether what has to be an array of `shapes` in any case may have `shape` too, so far as items must differ."""
        whole = [part for part in shapes.parts if isinstance(part, Array) and (part is shape or part in shapes.firm)]
        return not self._algebra.few_values.is_short(merged(whole)) or self._cases(shapes) is None

    def _next(self, frames: list[Frame]) -> int:
        top = frames[-1]
        if not top.is_array:
            return KEY
        frames[-1] = top._replace(number=top.number + 1, start=-1, inner=self._item(top.shapes, top.number + 1))
        return VALUE

    def _member(self, shapes: Containers, name: str) -> Containers:
        if (shapes, name) not in self._members:
            objects = [shape for shape in shapes.parts if isinstance(shape, Object)]
            found = [(self._algebra.member(shape, name), shape, shape in shapes.firm) for shape in objects]
            self._members[shapes, name] = self._containers(self._asked(found))
        return self._members[shapes, name]

    def _item(self, shapes: Containers, index: int) -> Containers:
        arrays = [shape for shape in shapes.parts if isinstance(shape, Array)]
        if not arrays:
            return Containers()
        longest = max(len(shape.prefix) for shape in arrays)
        place = (shapes, min(index, longest))
        if place not in self._items:
            found = [(item_at(shape, index), shape, shape in shapes.firm) for shape in arrays]
            wanted = [(wanted.shape, shape, False) for shape in arrays for wanted in shape.contains]
            found += [*wanted, *((ANYTHING, shape, False) for _, shape, _ in wanted)]
            self._items[place] = self._containers(self._asked(found))
        return self._items[place]

    def _asked(self, parts: Iterable[tuple[Shape, Object | Array, bool]]) -> Iterator[tuple[Shape, bool, bool]]:
        """Parts of containers, each as it may be asked for (True) or excluded (False), and whether in any case."""
        for part, container, firm in parts:
            yield part, True, firm and container not in self._excluded
            if container in self._excluded:
                yield part, False, False

    def _containers(self, shapes: Iterable[tuple[Shape, bool, bool]]) -> Containers:
        """The arrays and objects that these shapes, asked for or excluded, speak of, wherever they stand in them.

        What lacks the shape of an array is written as what lacks it whatever its items, so that they may be equal.
        """
        found: dict[Object | Array, None] = {}
        in_any_case: set[Object | Array] = set()
        work = list(shapes)
        seen = set(work)
        alternatives = [shape if positive else ANYTHING for shape, positive, firm in work if not firm]
        whole = both(*(shape for shape, _, firm in work if firm), union(*alternatives) if alternatives else ANYTHING)
        while work:
            shape, positive, firm = work.pop()
            match shape:
                case Object() | Array():
                    if not positive:
                        shape = replace(shape, unique=False) if isinstance(shape, Array) else shape
                        self._excluded.add(shape)
                    found[shape] = None
                    if firm:
                        in_any_case.add(shape)
                    continue
                case Both(parts):
                    if positive and self._is_scalar(shape):
                        continue  # what a condition on other kinds says of arrays and objects
                    more = [(part, positive, firm) for part in parts]
                case Union(parts):
                    more = [(part, positive, firm and tells_kinds_apart(parts)) for part in parts]
                case ExactlyOne(parts):
                    more = [(part, way, False) for part in parts for way in (True, False)]
                case Not(inner):
                    more = [(inner, not positive, False)]
                case Implied(inner):
                    more = [(inner, positive, firm)]
                case Reference(target):
                    more = [(self._algebra.resolve(target), positive, firm)]
                case _:
                    continue
            work += [part for part in more if part not in seen]
            seen.update(more)
        return Containers(tuple(found), frozenset(in_any_case), whole)

    def _is_scalar(self, shape: Shape) -> bool:
        """Whether it surely is neither an array nor an object."""
        try:
            return all(self._algebra.narrow(shape, kind) == NOTHING for kind in ("array", "object"))
        except GrammarError:
            return False

    def _can_differ(self, cursor: Cursor) -> bool:
        """Whether each item at hand can still become one that is not there yet."""
        for i, frame in enumerate(cursor.frames):
            begins = i == len(cursor.frames) - 1 and cursor.mode == (VALUE if frame.is_array else KEY)
            if not frame.unique or (frame.start < 0 and not begins) or not (taken := self._taken(frame)):
                continue
            begun = cursor.text[frame.start :] if frame.start >= 0 else b""
            languages = [
                language for language in self._languages_of(frame) if language is None or language.may_begin(begun)
            ]
            if languages and not any(language is None or language.has_more(begun, taken) for language in languages):
                return False
        return True

    def _languages_of(self, frame: Frame) -> list[ItemLanguage | None]:
        """Those of the item at hand, one for each way to be an array that items before leave open, or of the name."""
        if not frame.is_array:
            return [self._names_of(frame)]
        latest = self._open
        if latest is None or not (latest[0] is frame.shapes and latest[1] == frame.number and latest[2] is frame.seen):
            found = [
                self._items_of.of(way, frame.number)
                for way in self._ways_of(frame.shapes)
                if all(shape.max_items is None or frame.number < shape.max_items for shape in way)
                and not self._algebra.is_nothing(item_of(way, frame.number))
                and all(self._items_of.has(way, index, text) for index, (text, _) in enumerate(frame.seen))
            ]
            latest = self._open = (frame.shapes, frame.number, frame.seen, found)
        return latest[3]

    def _taken(self, frame: Frame) -> Seen:
        """The values that the item at hand must not have: those before it, and those that later ones need."""
        latest = self._needed
        if latest is None or not (
            latest[0].shapes is frame.shapes and latest[0].number == frame.number and latest[0].seen is frame.seen
        ):
            needed = self._needed_later(frame) if frame.is_array else ()
            latest = self._needed = (frame, (*frame.seen, *needed))
        return latest[1]

    def _needed_later(self, frame: Frame) -> Seen:
        """Values that items after the one at hand need, where the array has one way to go on."""
        ways = self._ways_of(frame.shapes)
        low = max((shape.min_items for shape in ways[0]), default=0) if len(ways) == 1 else 0
        if not frame.number + 1 < low <= frame.number + 1 + MAX_PLACES:
            return ()
        seen = {value for _, value in frame.seen}
        later = [self._items_of.values(ways[0], index) for index in range(frame.number + 1, low)]
        needed = needed_values([values - seen for values in later if values is not None])
        return tuple((value.encode(), value) for value in sorted(needed))

    def _complete(self, frames: list[Frame], text: bytes, end: int) -> bool:
        """Note that the item at hand ends; False if it equals one before, or is the only one left for a later one."""
        top = frames[-1] if frames else None
        if top is None or not top.unique or top.start < 0:
            return True
        item = text[top.start : end]
        value = one_spelling(item)
        if any(value == other for _, other in self._taken(top)):
            return False
        frames[-1] = top._replace(start=-1, seen=(*top.seen, (item, value)))
        return True

    def _names_of(self, frame: Frame) -> ItemLanguage | None:
        objects = [part for part in frame.shapes.parts if isinstance(part, Object)]
        firm = tuple(part for part in objects if part in frame.shapes.firm)
        listed = frozenset[str]().union(*(shape.listed for shape in firm))
        over = any(json.loads(text) not in listed for text, _ in frame.seen)  # listed ones come first
        are_all = len(firm) == len(objects)
        if (firm, are_all, over) not in self._names:
            closed = [part for part in (self._closed(firm) if are_all else firm) if isinstance(part, Object)]
            self._names[firm, are_all, over] = name_language(self._algebra, closed, listed if over else ())
        return self._names[firm, are_all, over]

    def _ways_of(self, shapes: Containers) -> list[Way]:
        """The ways to be an array here: the arrays that it then is."""
        if shapes.whole not in self._ways:
            cases = self._cases(shapes)
            if cases is None:
                cases = [tuple(shapes.firm)]
            ways = [tuple(shape for shape in case if isinstance(shape, Array)) for case in cases]
            possible = [way for way in ways if not way or not self._algebra.few_values.is_short(merged(list(way)))]
            self._ways[shapes.whole] = list(dict.fromkeys(possible or ways))
        return self._ways[shapes.whole]

    def _cases(self, shapes: Containers) -> list[tuple[Shape, ...]] | None:
        try:
            return self._algebra.cases.of(self._algebra.narrow(shapes.whole, "array"))
        except GrammarError:
            return None
