"""`uniqueItems`: follows JSON text as it is written, and says whether an item equals one before it, or has to."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.ast import NOTHING
from graftlm.core.grammar.automata.dfa import Dfa
from graftlm.core.grammar.automata.product import without_products
from graftlm.core.grammar.schema.algebra.shape_algebra import ShapeAlgebra, item_at
from graftlm.core.grammar.schema.algebra.shapes import (
    Array,
    Boolean,
    Both,
    ExactlyOne,
    Implied,
    Not,
    Null,
    Number,
    Object,
    Reference,
    Shape,
    Text,
    Union,
    both,
    union,
)

if TYPE_CHECKING:
    import numpy.typing as npt

    from graftlm.core.grammar.ast import Node

VALUE, STRING, ESCAPE, SCALAR, AFTER, KEY, KEY_STRING, KEY_ESCAPE, COLON = range(9)
_BLANKS, _ENDS = b" \t\r\n", b",]} \t\r\n"
_QUOTE, _BACKSLASH, _OPEN, _CLOSE, _OPEN_OBJECT, _CLOSE_OBJECT, _COMMA = b'"\\[]{},'
_ITEM_STATES = 2_000
_SCALARS = union(Null(), Boolean(), Number(), Text())
_FRACTION = re.compile(rb"(-?\d+(?:\.\d+)?)\.?")
_MAX_DIGITS = 17
_ZERO = re.compile(rb"-?0(\.0*)?[eE].*")

Containers = tuple[Object | Array, ...]


class Frame(NamedTuple):
    """An open array or object.

    is_array  which of them
    shapes  what schemas say of it
    inner   what they say of the value at hand
    unique  whether its items must differ
    number  how many items came before the one at hand
    start   where in the text the item at hand begins; -1 between items
    seen    the items before, as written and in one spelling
    """

    is_array: bool
    shapes: Containers
    inner: Containers
    unique: bool = False
    number: int = 0
    start: int = -1
    seen: tuple[tuple[bytes, str], ...] = ()


class Cursor(NamedTuple):
    """A place in JSON text. `text` reaches back to where the outermost item at hand began."""

    mode: int = VALUE
    frames: tuple[Frame, ...] = ()
    text: bytes = b""
    key: int = -1

    @property
    def is_watching(self) -> bool:
        return any(frame.unique for frame in self.frames)


class DistinctItems:
    """The arrays of one schema whose items must differ; `lower` gives the language of an item, None if not regular."""

    def __init__(self, root: Shape, algebra: ShapeAlgebra, lower: Callable[[Shape], Node | None]) -> None:
        self._algebra = algebra
        self._lower = lower
        self._members: dict[tuple[Containers, str], Containers] = {}
        self._items: dict[tuple[Containers, int], Containers] = {}
        self._languages: dict[tuple[Containers, int], _ItemLanguage | None] = {}
        self._excluded: set[Object | Array] = set()  # what some value must not be: its parts may exclude or ask
        self._root = self._containers([(root, True)])

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
                    if not _complete(frames, text, position + 1):
                        return None
                elif byte == _QUOTE:
                    top = frames[-1]
                    if top.shapes:
                        name = json.loads(text[key : position + 1])
                        frames[-1] = top._replace(inner=self._member(top.shapes, name))
                    mode, key = COLON, -1
            elif mode in (ESCAPE, KEY_ESCAPE):
                mode -= 1
            elif mode == SCALAR and byte not in _ENDS or byte in _BLANKS and mode != SCALAR:
                pass
            elif mode == VALUE and byte != _CLOSE:
                if frames and frames[-1].unique:
                    frames[-1] = frames[-1]._replace(start=position)
                inner = frames[-1].inner if frames else self._root
                if byte in (_OPEN, _OPEN_OBJECT):
                    frames.append(self._frame(inner, byte == _OPEN))
                    mode = VALUE if byte == _OPEN else KEY
                else:
                    mode = STRING if byte == _QUOTE else SCALAR
            elif mode == KEY and byte == _QUOTE:
                mode, key = KEY_STRING, position
            elif mode == COLON:
                mode = VALUE
            else:
                if mode == SCALAR and not _complete(frames, text, position):
                    return None
                mode = AFTER
                if byte == _COMMA:
                    mode = self._next(frames)
                elif byte in (_CLOSE, _CLOSE_OBJECT):
                    frames.pop()
                    if not _complete(frames, text, position + 1):
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
            if frame.unique and frame.seen and (language := self._language(frame)) is not None
        )

    def fresh(self, cursor: Cursor) -> Iterator[bytes]:
        """What may come next so that the item at hand differs from those before, if the schema allows it."""
        in_array = bool(cursor.frames) and cursor.frames[-1].is_array
        numbers = range(sum(len(frame.seen) for frame in cursor.frames) + 2)
        forms = {
            VALUE: [b"%d", b'"%d"', b"[%d", b'{"%d":0'],
            STRING: [b'%d"'],
            SCALAR: [b"%d", b".%d", b"%d1"],
            AFTER: [b",%d", b',"%d"'] if in_array else [b',"%d":0'],
            KEY: [b'"%d":0'],
            KEY_STRING: [b'%d":0'],
            COLON: [b":%d", b':"%d"'],
        }.get(cursor.mode, [])
        return (form % number for form in forms for number in numbers)

    def _frame(self, shapes: Containers, is_array: bool) -> Frame:
        mine = tuple(shape for shape in shapes if isinstance(shape, Array) == is_array)
        unique = is_array and any(isinstance(shape, Array) and shape.unique for shape in mine)
        return Frame(is_array, mine, self._item(mine, 0) if is_array else (), unique)

    def _next(self, frames: list[Frame]) -> int:
        top = frames[-1]
        if not top.is_array:
            return KEY
        frames[-1] = top._replace(number=top.number + 1, start=-1, inner=self._item(top.shapes, top.number + 1))
        return VALUE

    def _member(self, shapes: Containers, name: str) -> Containers:
        if (shapes, name) not in self._members:
            found = [(self._algebra.member(shape, name), shape) for shape in shapes if isinstance(shape, Object)]
            self._members[shapes, name] = self._containers(self._ways(found))
        return self._members[shapes, name]

    def _item(self, shapes: Containers, index: int) -> Containers:
        if not shapes:
            return ()
        longest = max(len(shape.prefix) for shape in shapes if isinstance(shape, Array))
        place = (shapes, min(index, longest))
        if place not in self._items:
            arrays = [shape for shape in shapes if isinstance(shape, Array)]
            found = [(item_at(shape, index), shape) for shape in arrays]
            found += [(wanted.shape, shape) for shape in arrays for wanted in shape.contains]
            self._items[place] = self._containers(self._ways(found))
        return self._items[place]

    def _ways(self, parts: Iterable[tuple[Shape, Object | Array]]) -> Iterator[tuple[Shape, bool]]:
        """Parts of containers, each as it may be asked for (True) or excluded (False)."""
        for part, container in parts:
            yield part, True
            if container in self._excluded:
                yield part, False

    def _containers(self, shapes: Iterable[tuple[Shape, bool]]) -> Containers:
        """The arrays and objects that these shapes, asked for or excluded, speak of, wherever they stand in them.

        What lacks the shape of an array is written as what lacks it whatever its items, so that they may be equal.
        """
        found: dict[Object | Array, None] = {}
        work = list(shapes)
        seen = set(work)
        while work:
            shape, positive = work.pop()
            match shape:
                case Object() | Array():
                    if not positive:
                        shape = replace(shape, unique=False) if isinstance(shape, Array) else shape
                        self._excluded.add(shape)
                    found[shape] = None
                    continue
                case Union(parts) | Both(parts):
                    more = [(part, positive) for part in parts]
                case ExactlyOne(parts):
                    more = [(part, way) for part in parts for way in (True, False)]
                case Not(inner):
                    more = [(inner, not positive)]
                case Implied(inner):
                    more = [(inner, positive)]
                case Reference(target):
                    more = [(self._algebra.resolve(target), positive)]
                case _:
                    continue
            work += [part for part in more if part not in seen]
            seen.update(more)
        return tuple(found)

    def _can_differ(self, cursor: Cursor) -> bool:
        """Whether each item at hand can still become one that is not there yet."""
        for i, frame in enumerate(cursor.frames):
            begins = i == len(cursor.frames) - 1 and cursor.mode == VALUE
            if not frame.unique or not frame.seen or (frame.start < 0 and not begins):
                continue
            language = self._language(frame)
            if language is not None and not language.has_more(
                cursor.text[frame.start :] if frame.start >= 0 else b"", frame
            ):
                return False
        return True

    def _language(self, frame: Frame) -> _ItemLanguage | None:
        arrays = tuple(shape for shape in frame.shapes if isinstance(shape, Array) and shape.unique)
        place = (arrays, min(frame.number, max(len(shape.prefix) for shape in arrays)))
        if place not in self._languages:
            shape = union(*(item_at(shape, place[1]) for shape in arrays))
            node, is_whole = self._lower(shape), True
            if node is None:  # not regular for its arrays and objects, of which there is no end
                node, is_whole = self._lower(both(shape, _SCALARS)), False
            self._languages[place] = None if node in (None, NOTHING) else _ItemLanguage.of(node, is_whole)
        return self._languages[place]


class _ItemLanguage:
    """The texts of an item, and how many there are from each state of their automaton.

    counts    float64 [num_states]: infinite where there is no end of them
    is_whole  False where an item may also be an array or object, which is not in the automaton
    """

    def __init__(self, dfa: Dfa, is_whole: bool) -> None:
        self._dfa = dfa
        self._is_whole = is_whole
        self.counts = _count_words(dfa)
        digits = np.unique(dfa.classes[ord("1") : ord("9") + 1])
        changing = self.counts[dfa.table[:, digits]].any(axis=1)
        self._may_change = _leading_to(dfa, changing)
        self._may_run_out = _leading_to(dfa, ~dfa.accepting & np.isfinite(self.counts))

    @classmethod
    def of(cls, node: Node, is_whole: bool) -> _ItemLanguage | None:
        from graftlm.core.grammar.spec import Limits

        try:
            return cls(
                Dfa.compile(without_products(node), Limits(states=_ITEM_STATES, seconds=1.0), counters=False), is_whole
            )
        except GrammarError:
            return None  # so large that items hardly run out

    def has_more(self, begun: bytes, frame: Frame) -> bool:
        place = self._dfa.walk(self._dfa.start, begun)
        if place is None or not (begun or self._is_whole):
            return True  # the item is of another alternative, or can be
        if _ZERO.fullmatch(begun) and any(value == "0" for _, value in frame.seen):
            return False  # whatever the exponent
        fraction = _FRACTION.fullmatch(begun)
        if fraction and (len(fraction[0]) > _MAX_DIGITS or not self._may_change[place[0]]):
            value = _as_read(fraction[1].decode())  # what may follow are zeros, or more than float64 holds
            return all(value != other for _, other in frame.seen)
        if self.counts[place[0]] > sum(text.startswith(begun) for text, _ in frame.seen):
            return True
        return not all(self._dfa.matches(text) for text, _ in frame.seen)  # then the array is of another alternative

    def may_run_out(self, begun: bytes) -> bool:
        place = self._dfa.walk(self._dfa.start, begun)
        return place is not None and bool(self._may_run_out[place[0]])


def _leading_to(dfa: Dfa, states: Any) -> npt.NDArray[np.bool_]:
    """The live states from which one of `states` can be reached, these included."""
    found: npt.NDArray[np.bool_] = states.copy()
    found[0] = False
    while True:
        more = found | found[dfa.table].any(axis=1)
        more[0] = False
        if (more == found).all():
            return found
        found = more


def _count_words(dfa: Dfa) -> npt.NDArray[np.float64]:
    sizes = np.bincount(dfa.classes, minlength=dfa.table.shape[1])
    known = np.zeros(dfa.num_states, bool)
    known[0] = True
    counts = np.zeros(dfa.num_states)
    while True:
        ready = known[dfa.table].all(axis=1) & ~known
        if not ready.any():
            counts[~known] = np.inf
            return counts
        counts[ready] = dfa.accepting[ready] + (counts[dfa.table[ready]] * sizes).sum(axis=1)
        known |= ready


def _complete(frames: list[Frame], text: bytes, end: int) -> bool:
    """Note that the item at hand ends; False if it equals one before."""
    top = frames[-1] if frames else None
    if top is None or not top.unique or top.start < 0:
        return True
    item = text[top.start : end]
    value = _one_spelling(item)
    if any(value == other for _, other in top.seen):
        return False
    frames[-1] = top._replace(start=-1, seen=(*top.seen, (item, value)))
    return True


class _Number(NamedTuple):
    """A number as it is written."""

    text: str


def _as_read(text: str) -> str:
    """Equal for numbers that are equal once they are read: those with a fraction or exponent become float64."""
    if text.removeprefix("-").isdigit():
        return "0" if text == "-0" else text
    value = float(text)
    if math.isinf(value) or (value == 0 and any(digit in "123456789" for digit in text.lower().partition("e")[0])):
        return text  # beyond float64: readers differ
    return str(int(value)) if value.is_integer() else repr(value)


def _one_spelling(item: bytes) -> str:
    """Equal for equal values: 1 and 1.0, members in any order, characters escaped or not."""
    if item[:1] == b'"' and b"\\" not in item:
        return item.decode()
    return _canonical(json.loads(item, parse_float=_Number, parse_int=_Number))


def _canonical(value: Any) -> str:
    match value:
        case dict():
            return (
                "{" + ",".join(sorted(f"{json.dumps(name)}:{_canonical(item)}" for name, item in value.items())) + "}"
            )
        case list():
            return "[" + ",".join(map(_canonical, value)) + "]"
        case _Number(text):
            return _as_read(text)
        case str():
            return json.dumps(value, ensure_ascii=False)
        case _:
            return json.dumps(value)
