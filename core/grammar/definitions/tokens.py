"""The tokens of a grammar's text, each with its place."""

from __future__ import annotations

import json
import re
from collections.abc import Container
from dataclasses import dataclass
from typing import NoReturn

from graftlm.core.errors import GrammarError

_UNCLOSED = {'"': 'the text has no closing "', "/": "the pattern has no closing /", "[": "the class has no closing ]"}


@dataclass(frozen=True, slots=True)
class Token:
    """One token: its kind (the name of a group of the notation's pattern), its text, its offset in the grammar."""

    kind: str
    text: str
    at: int


def tokenise(text: str, notation: re.Pattern[str], before_json: Container[str] = ()) -> list[Token]:
    """All tokens but those of the kind `skip`, and one of the kind `end` after them.

    before_json  tokens that a JSON value follows, which becomes a token of the kind `json`

    Raises GrammarError where none of `notation` fits.
    """
    tokens, at = list[Token](), 0
    while at < len(text):
        found = notation.match(text, at)
        if found is None:
            fail(text, at, _reason(text, at))
        at = found.end()
        if found.lastgroup == "skip":
            continue
        tokens.append(Token(str(found.lastgroup), found.group(), found.start()))
        if found.group() in before_json:
            at = _after_json(text, at)
            tokens.append(Token("json", text[found.end() : at], found.end()))
    tokens.append(Token("end", "", len(text)))
    return tokens


def _after_json(text: str, at: int) -> int:
    while text[at : at + 1].isspace():
        at += 1
    try:
        return int(json.JSONDecoder().raw_decode(text, at)[1])
    except json.JSONDecodeError as error:
        fail(text, min(error.pos, len(text)), f"this is no JSON: {error.msg}; a JSON value stands here")
    except RecursionError:
        fail(text, at, "the JSON nests too deep; flatten it")


def place_of(text: str, at: int) -> str:
    """Line and column of an offset, as people count."""
    before = text[:at]
    return f"line {before.count(chr(10)) + 1}, column {at - before.rfind(chr(10))}"


def fail(text: str, at: int, reason: str) -> NoReturn:
    raise GrammarError(f"{place_of(text, at)}: {reason}", position=at)


def _reason(text: str, at: int) -> str:
    char = text[at]
    if char in _UNCLOSED:
        line = text[at:].partition("\n")[0]
        closed = line.find(char if char != "[" else "]", 1) > 0
        what = "an escape or a character here is not allowed" if closed and char == '"' else _UNCLOSED[char]
        return f"{what} (in {line[:40]}); close it on its line, and write control characters as \\n, \\t or \\u0001"
    return f"{char!r} begins nothing that is known here; put text in double quotes"
