"""A place in JSON text as it is written: the open arrays and objects, and what schemas say of them."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from graftlm.core.grammar.schema.algebra.shapes import ANYTHING, Array, Object, Shape

VALUE, STRING, ESCAPE, SCALAR, AFTER, KEY, KEY_STRING, KEY_ESCAPE, COLON = range(9)


class Containers(NamedTuple):
    """Arrays and objects that schemas speak of at one place.

    firm   those of them that its value has to be in any case
    whole  what its value has to be, as far as it is known
    """

    parts: tuple[Object | Array, ...] = ()
    firm: frozenset[Object | Array] = frozenset()
    whole: Shape = ANYTHING


Seen: TypeAlias = tuple[tuple[bytes, str], ...]


class Frame(NamedTuple):
    """An open array or object.

    is_array  whether it is an array
    shapes    what schemas say of it
    inner     what they say of the value at hand
    unique    whether its items, or the names of its members, must differ
    doubtful  whether more different items may be asked for than the language of an item shows
    number    how many items came before the one at hand
    start     byte of the cursor's text at which the item or name at hand begins; -1 between them
    seen      the items or names before, as written and in one spelling
    """

    is_array: bool
    shapes: Containers
    inner: Containers
    unique: bool = False
    number: int = 0
    start: int = -1
    seen: Seen = ()
    doubtful: bool = False


class Cursor(NamedTuple):
    """A place in JSON text.

    mode    what may come next: VALUE to COLON
    frames  the open arrays and objects, the outermost first
    text    the bytes since the outermost item at hand began
    key     byte of `text` at which the name of the member at hand begins; -1 outside of names
    """

    mode: int = VALUE
    frames: tuple[Frame, ...] = ()
    text: bytes = b""
    key: int = -1

    @property
    def is_watching(self) -> bool:
        return any(frame.unique for frame in self.frames)
