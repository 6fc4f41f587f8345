"""Whether a value that is begun may become one that is known, and what would come next."""

from __future__ import annotations

import json
from typing import Any

import pytest

from graftlm.core.grammar.schema.distinct.begun_value import next_texts
from graftlm.core.grammar.schema.spelling import one_spelling

VALUE: dict[str, Any] = {"a": 1, "b": ["x", True, {"é": None}], "c": {}}
SPELLINGS = [
    json.dumps(VALUE),
    json.dumps(VALUE, separators=(",", ":"), ensure_ascii=False),
    '{"c":{},"b":["\\u0078",true,{"\\u00e9":null}],"a":1.0}',
    ' { "b" : [ "x" , true , { "é" : null } ] , "a" : 10e-1, "c" : { } } ',
]


@pytest.mark.parametrize("text", SPELLINGS)
def test_every_beginning_of_every_spelling_may_become_the_value(text: str) -> None:
    data = text.encode()
    value = one_spelling(data)
    assert [end for end in range(len(data)) if not next_texts(data[:end], value)] == []


def test_what_comes_next_in_the_usual_spelling_is_told() -> None:
    value = one_spelling(json.dumps(VALUE).encode())
    usual = '{"a":1,"b":["x",true,{"é":null}],"c":{}}'
    for end in range(len(usual)):
        found = next_texts(usual[:end].encode(), value)
        assert any(map(usual[end:].startswith, found)), usual[:end]


@pytest.mark.parametrize(
    "begun",
    [
        '{"d',
        '{"a":2,',
        '{"a":"',
        '{"a":1,"b":["y',
        '{"a":1}',
        '{"b":["x",f',
        '{"b":["x",true]',
        "[",
        '{"c":[',
        '{"b":{',
    ],
)
def test_what_differs_from_the_value_already_cannot_become_it(begun: str) -> None:
    assert not next_texts(begun.encode(), one_spelling(json.dumps(VALUE).encode()))


def test_characters_and_escapes_that_are_cut_in_two_are_waited_for() -> None:
    value = one_spelling('["é😀"]'.encode())
    for begun in (
        '["é'.encode()[:-1],
        rb'["\u00',
        rb'["\u00e9\ud83d',
        rb'["\u00e9\ud83d' + b"\\",
        '["é😀'.encode()[:-2],
    ):
        assert next_texts(begun, value), begun
    assert not next_texts(b'["a', value)
