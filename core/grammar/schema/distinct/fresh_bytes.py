"""Bytes that may come next so that the item at hand becomes another one."""

from __future__ import annotations

from collections.abc import Iterator

from graftlm.core.grammar.schema.cursor import AFTER, COLON, KEY, KEY_STRING, SCALAR, STRING, VALUE, Cursor

_FORMS = {
    VALUE: [b"%d", b'"%d"', b"[%d", b'{"%d":0'],
    STRING: [b'%d"'],
    SCALAR: [b"%d", b".%d", b"%d1"],
    KEY: [b'"%d"', b'"%d":0'],
    KEY_STRING: [b'%d"', b'%d":0'],
    COLON: [b":%d", b':"%d"'],
}
_AFTER_ITEM, _AFTER_MEMBER = [b",%d", b',"%d"'], [b',"%d"', b',"%d":0']


def fresh_bytes(cursor: Cursor) -> Iterator[bytes]:
    """Numbers, strings and names as numbers, one of which at least is new at `cursor`."""
    in_array = bool(cursor.frames) and cursor.frames[-1].is_array
    forms = _FORMS.get(cursor.mode, [])
    if cursor.mode == AFTER:
        forms = _AFTER_ITEM if in_array else _AFTER_MEMBER
    numbers = range(sum(len(frame.seen) for frame in cursor.frames) + 2)
    yield from (form % number for form in forms for number in numbers)
