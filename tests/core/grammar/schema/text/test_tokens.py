"""The tokens of JSON and their whitespace."""

from __future__ import annotations

import pytest

from graftlm import Vocabulary
from graftlm.core.grammar import Grammar
from graftlm.core.grammar.nodes import nodes
from graftlm.core.grammar.schema.text.tokens import JsonTokens
from graftlm.core.grammar.spec import Composite, JsonSchema, Options

BYTES = Vocabulary([bytes([byte]) for byte in range(256)] + [b""], eos_token_id=256)


def tokens(whitespace: str = "compact") -> JsonTokens:
    return JsonTokens(JsonSchema({"type": "object"}), Options(whitespace=whitespace))  # type: ignore[arg-type]


def takes(node: nodes.Node, text: str) -> bool:
    matcher = Grammar.compile(Composite(node), BYTES).matcher()
    return matcher.advance(list(text.encode())) == len(text) and matcher.accepting


@pytest.mark.parametrize(
    ("whitespace", "text"),
    [("compact", '{"a":[1,2]}'), ("single", '{"a": [1, 2]}'), ("flexible", '{ "a" :\n[1 ,2]\t}')],
)
def test_a_literal_is_written_with_the_whitespace_asked_for(whitespace: str, text: str) -> None:
    node = tokens(whitespace).literal({"a": [1, 2]})
    assert takes(node, text)
    assert takes(node, '{"a":[1,2]}') == (whitespace != "single")


def test_a_whole_float_has_both_spellings() -> None:
    assert takes(tokens().scalar(2.0), "2") and takes(tokens().scalar(2.0), "2.0")


def test_other_names_leave_out_those_that_are_listed() -> None:
    written = tokens()
    node = written.key(written.other_names(["a"]))
    assert takes(node, '"b":') and takes(node, '"ab":') and not takes(node, '"a":')


def test_other_names_than_the_same_ones_are_one_node_in_any_order() -> None:
    written = tokens()
    assert written.other_names(["a", "bc"]) is written.other_names(["bc", "a"])
    assert written.other_names(["a", "bc"]) != written.other_names(["a", "b"])


def test_other_names_are_one_language_as_an_automaton_and_as_its_source() -> None:
    for names in (["a", "bc"], ["a/b", "\n"]):
        found = tokens().other_names(names)
        assert isinstance(found, nodes.Automaton) and found.source is not None
        for text in ("a", "b", "bc", "bcd", "", "a/b", "\\n", "ä"):
            assert takes(found, text) == takes(found.source, text), text


def test_brackets_around_nothing_are_nothing() -> None:
    assert tokens().bracketed("[", nodes.NOTHING, "]") == nodes.NOTHING
