"""Strings and names as JSON spells them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings, strategies as st

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.automata.dfa import Dfa
from graftlm.core.grammar.automata.products import product
from graftlm.core.grammar.engines.lark_writer import to_lark
from graftlm.core.grammar.nodes import nodes
from graftlm.core.grammar.regex.parser import parse
from graftlm.core.grammar.schema.text import json_text

TEXTS = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from('"\\/\n\t\x00\x1f\x7fé'), max_size=5)


def spelled(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


@settings(max_examples=60)
@given(st.lists(TEXTS, max_size=3), st.lists(TEXTS, min_size=3, max_size=6))
def test_other_names_are_all_but_the_given_ones(names: list[str], texts: list[str]) -> None:
    node = json_text.other_names(names)
    for text in [*texts, *names, *(name + "a" for name in names), *(name[:-1] for name in names)]:
        assert product.matches(node, spelled(text)) == (text not in names), (names, text)


def test_other_names_take_one_state_for_all_that_left_the_given_ones() -> None:
    few, more = (Dfa.compile(json_text.other_names(names)).num_states for names in (["ab"], ["ab", "cd", "ef"]))
    assert more - few == 2 * 2  # a state for each letter of the two names


@pytest.mark.parametrize("names", [["/"], ["a/b", "a"], ["a/"]])
def test_a_name_cannot_come_back_by_escaping_its_slash(names: list[str]) -> None:
    node = json_text.other_names(names)
    for name in names:
        assert not product.matches(node, name.replace("/", "\\/"))


@settings(max_examples=60)
@given(TEXTS)
def test_free_text_has_the_spelling_of_json_dumps(text: str) -> None:
    assert product.matches(nodes.star(json_text.TEXT_CHAR), spelled(text))
    assert product.matches(nodes.star(json_text.NAME_CHAR), spelled(text))
    assert product.matches(json_text.string(text), json.dumps(text, ensure_ascii=False))


def test_a_pattern_is_spelled_with_its_escapes() -> None:
    node = json_text.spell(parse(r'[\n"a]\\{2}'))
    assert [text for text in ("a\\\\\\\\", '\\"\\\\\\\\', "\\n\\\\\\\\") if not product.matches(node, text)] == []
    assert not product.matches(node, '"\\\\\\\\') and not product.matches(node, "a\\\\")


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 0x24), st.integers(0, 0x7F)), max_size=4))
def test_a_character_of_some_ranges_has_the_one_spelling_of_json_dumps(ranges: list[tuple[int, int]]) -> None:
    node = json_text.spelling(ranges)
    for code in range(0x80):
        assert product.matches(node, spelled(chr(code))) == any(low <= code <= high for low, high in ranges), code
    others = ["", "\\", "\\u00", "\\u000", "\\/", "\\v", "\\u000B", "\\u000a", "\\u0022", "\\u0020", "\\u001fa"]
    assert [text for text in others if product.matches(node, text)] == []


def test_escapes_are_written_with_what_they_share() -> None:
    assert to_lark(json_text.spelling([(9, 13), (0x22, 0x22)]), {}).count(r"\x{5C}") == 1
    assert json_text.spelling([(10, 10)]) == nodes.literal("\\n")


def test_a_lone_surrogate_cannot_be_written() -> None:
    with pytest.raises(GrammarError, match="lone surrogate"):
        json_text.string("a\ud800")


@pytest.mark.parametrize("pattern", ["(?s:.*)", r'["\\]*', r"[\x00-\x1f]", "a|é😀", r"(?:a|b|\n){3}"])
def test_an_automaton_is_spelled_as_its_texts_are(pattern: str) -> None:
    plain = product.product(parse(pattern))
    written = json_text.spell(plain)
    for text in ("", "a", "é😀", '"', "\\", '\\"a', "\n", "\t\r", "\x00", "\x1f", "\x0b", "ab\n", "\x7f"):
        assert product.matches(written, spelled(text)) == product.matches(plain, text)
    assert not any(product.matches(written, text) for text in ('"', "\\", "\n", "\x00"))
