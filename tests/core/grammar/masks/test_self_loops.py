"""States that repeat a class of characters are found, with what is left of the repeat."""

from __future__ import annotations

import pytest

from graftlm.core.grammar.automata.dfa import Dfa
from graftlm.core.grammar.automata.stack.dpda_builder import build_dpda
from graftlm.core.grammar.masks.self_loops import self_loop
from graftlm.core.grammar.masks.slices import JSON_STRING
from graftlm.core.grammar.regex.parser import parse
from tests.core.grammar.automata.stack.test_dpda import of_schema
from tests.core.grammar.masks.test_masks import STRING


@pytest.mark.parametrize("counts", ["*", "+", "{0,400}", "{5,400}", "{20,}"])
def test_json_strings_of_any_length_share_one_slice(counts: str) -> None:
    dfa = Dfa.compile(parse(STRING % counts))
    place = dfa.walk(dfa.start, b'"abc')
    assert place is not None
    loop = self_loop(dfa, place[0])
    assert loop is not None and loop.chars == JSON_STRING


def test_a_repeat_that_is_written_out_has_room_for_what_is_left_of_it() -> None:
    tree = {"type": "object", "properties": {"s": {"type": "string", "maxLength": 9}, "k": {"$ref": "#"}}}
    dpda = build_dpda(*of_schema(tree))
    for text, room in ((b"", 9), (b"abc", 6), ("éé".encode(), 7)):
        place = dpda.walk(dpda.start, b'{"s":"' + text)
        assert place is not None
        loop = self_loop(dpda, place[0], 20)
        assert loop is not None and (loop.chars, loop.room) == (JSON_STRING, room)
        assert loop.exits == b"".join(bytes(byte in signs for byte in range(128)) for signs in (b'"\\', b"u"))
        shortened = self_loop(dpda, place[0], room)
        assert shortened is not None and shortened.room is None  # no token is longer
