"""How a string that is being written can end."""

from __future__ import annotations

import pytest

from graftlm.core.grammar import ast
from graftlm.core.grammar.engines.string_endings import StringEndings, open_string
from graftlm.core.grammar.regex.regex import parse


def quoted(pattern: str) -> ast.Node:
    return ast.concat(ast.literal('"'), parse(pattern), ast.literal('"'))


def test_endings_of_all_languages_come_shortest_first() -> None:
    endings = StringEndings([quoted("[a-z]{3}-[0-9]{2}"), quoted("a+b?c"), ast.literal('"key":')])
    assert list(endings.of(b'"a')) == [b'c"', b'aa-00"']
    assert list(endings.of(b'"ab')) == [b'c"', b'a-00"']
    assert list(endings.of(b'"A')) == []
    assert not StringEndings([ast.literal('"key"')])


@pytest.mark.parametrize(
    ("text", "found"),
    [(b"", None), (b'{"a', b'"a'), (b'{"a":1', None), (rb'["\"b', rb'"\"b'), (rb'["\\"', None), (b'["a","', b'"')],
)
def test_the_string_at_hand_is_what_an_open_quotation_mark_begins(text: bytes, found: bytes | None) -> None:
    assert open_string(text) == found
