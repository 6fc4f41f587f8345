"""A JSON value that is begun: whether it may become one that is known, however that is spelled."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

from graftlm.core.grammar.schema.distinct.item_language import as_read

_BLANKS = re.compile(r"[ \t\r\n]*")
_SCALAR = re.compile(r"[^,\]} \t\r\n]*")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_CUT_ESCAPE = re.compile(r"(?<!\\)((?:\\\\)*)\\(?:u[0-9a-fA-F]{0,3})?\Z")
_HIGH_SURROGATE = re.compile(r"[\ud800-\udbff]\Z")


class _Number(str):
    """A number, equal to others in the spelling of `as_read`."""


def next_texts(begun: bytes, value: str) -> set[str]:
    """What may come next, in its usual spelling, where `begun` is to become `value`; nothing if it cannot.

    value  in the spelling of `one_spelling`
    -> an empty text stands for any
    """
    return _Reader(begun.decode(errors="ignore")).next_texts(_parsed(value))


@lru_cache(maxsize=256)
def _parsed(value: str) -> Any:
    return json.loads(value, parse_int=_Number, parse_float=_Number)


class _Reader:
    """Compares text with a value as it reads it."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._position = 0
        self._found: set[str] = set()

    def next_texts(self, value: Any) -> set[str]:
        if not self._may_be(value):
            return set()
        return self._found or {""}

    def _may_be(self, value: Any) -> bool:
        """Whether the value at hand, or what there is of it, may be `value`; then it is read."""
        sign = self._sign()
        if not sign:
            self._found.add(_beginning(value))
            return True
        if sign == '"':
            return self._is_string([value] if type(value) is str else [])
        if sign == "{":
            return isinstance(value, dict) and self._is_object(value)
        if sign == "[":
            return isinstance(value, list) and self._is_array(value)
        found = _SCALAR.match(self._text, self._position)
        assert found is not None
        self._position = found.end()
        is_whole = self._position < len(self._text)
        if sign in "-0123456789":
            self._found |= set() if is_whole else {""}
            return isinstance(value, _Number) and (not is_whole or as_read(found[0]) == value)
        text = json.dumps(value)
        self._found |= set() if is_whole else {text[len(found[0]) :]}
        return text == found[0] if is_whole else text.startswith(found[0])

    def _is_array(self, items: list[Any]) -> bool:
        number = 0
        self._position += 1
        while sign := self._sign():
            if sign == "]":
                self._position += 1
                return number == len(items)
            if sign == ",":
                self._position += 1
                if number == len(items):
                    return False
            elif number == len(items) or not self._may_be(items[number]):
                return False
            else:
                number += 1
                if self._is_at_end():
                    self._found |= set() if self._found else {"," if number < len(items) else "]"}
                    return True
        self._found.update([_beginning(items[number])] if number < len(items) else ["]"])
        return True

    def _is_object(self, members: dict[str, Any]) -> bool:
        left = dict(members)
        self._position += 1
        while sign := self._sign():
            if sign == "}":
                self._position += 1
                return not left
            if sign == ",":
                self._position += 1
                if not left:
                    return False
                continue
            start = self._position
            if not self._is_string(list(left)):
                return False
            if self._is_at_end() and not _STRING.fullmatch(self._text, start):
                return True
            name = json.loads(self._text[start : self._position])
            if self._sign() != ":":
                self._found.add(":")
                return True
            self._position += 1
            if not self._may_be(left.pop(name)):
                return False
            if self._is_at_end():
                self._found |= set() if self._found else {"," if left else "}"}
                return True
        self._found.update(map(_beginning, left) if left else ["}"])
        return True

    def _is_string(self, values: list[str]) -> bool:
        """Whether the string at hand, or what there is of it, may be one of `values`; then it is read."""
        found = _STRING.match(self._text, self._position)
        if found is not None:
            self._position = found.end()
            return json.loads(found[0]) in values
        begun = _CUT_ESCAPE.sub(r"\1", self._text[self._position :])
        text = _HIGH_SURROGATE.sub("", json.loads(begun + '"'))
        self._position = len(self._text)
        rests = [value[len(text) :] for value in values if value.startswith(text)]
        self._found.update(json.dumps(rest, ensure_ascii=False)[1:] for rest in rests)
        return bool(rests)

    def _is_at_end(self) -> bool:
        return not self._sign()

    def _sign(self) -> str:
        """The sign behind blanks, where a value begins or what is between values; empty at the end."""
        found = _BLANKS.match(self._text, self._position)
        assert found is not None
        self._position = found.end()
        return self._text[self._position : self._position + 1]


def _beginning(value: Any) -> str:
    match value:
        case _Number():
            return ""
        case dict():
            return "{"
        case list():
            return "["
        case _:
            return json.dumps(value, ensure_ascii=False)
