"""Letters and plain texts tell what a product would: some languages have no text in common, others have one."""

from __future__ import annotations

from itertools import combinations

import pytest

from graftlm.core.grammar.automata.matching import matches
from graftlm.core.grammar.automata.products import product
from graftlm.core.grammar.automata.products.letters import are_apart, letters
from graftlm.core.grammar.automata.products.plain_text import plain_text
from graftlm.core.grammar.nodes import nodes
from graftlm.core.grammar.schema.algebra.text_language import pattern_node

PATTERNS = (
    r"^https?://[a-z]+\b/?$",
    r"^[~/][a-z/]+$",
    r"^[a-z_]\w*$",
    r"^([a-z_]\w*)?\$\{\w+\}$",
    r"\$\{\w+\}",
    r"\.js$",
    r"\.(jsx|m?js)$|^jsx$",
    r"(^|/)\.?s?css$",
    r"(\.less|xs)+$",
    r"^https?:",
    r"^~/",
    r"^a{2,3}(b|c)?$",
    r"^(?!b)[ab]*$",
    r"^$",
    r"^é+$",
    r"^[^a-z]*$",
    r"^(?:x?y?)*$",
    r"^(?=.*1)[0-9a]{4}$",
)


@pytest.mark.parametrize("patterns", list(combinations(PATTERNS, 2)))
def test_languages_that_are_apart_have_no_text_in_common(patterns: tuple[str, str]) -> None:
    one, other = map(pattern_node, patterns)
    if are_apart(one, other):
        assert product.is_empty(nodes.Intersection((one, other)))


@pytest.mark.parametrize(
    "patterns",
    [
        (r"^https?://[a-z]+\b/?$", r"^[~/][a-z/]+$"),  # they begin with other letters
        (r"^[a-z_]\w*$", r"^([a-z_]\w*)?\$\{\w+\}$"),  # one needs what the other has not
        (r"^[a-z_]\w*$", r"\$\{\w+\}"),
        (r"^https?://[a-z]+\b/?$", r"^[a-z]+/[a-z]+$"),
        (r"^é+$", r"^[a-z]+$"),
        (r"^schema ", r"^sequence "),
        (r"\.less$", r"\.(scss|sass)$"),  # they end with other words
        (r"^a*\.(jsx|js|es6)$", r"\.coffee$|(?:\.lit|b)coffee$"),
    ],
)
def test_patterns_are_apart_by_how_they_begin_and_end_and_by_what_they_need(patterns: tuple[str, str]) -> None:
    one, other = map(pattern_node, patterns)
    assert are_apart(one, other) and are_apart(other, one)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_letters_hold_for_texts_of_the_language(pattern: str) -> None:
    node = pattern_node(pattern)
    found = letters(node)
    for text in ("", "https://a/", "~a/", "_a1", "a${b}", "${b}.js", "aab", "a", "é", "A-", "xyx", "a1a1"):
        if matches(node, text):
            assert text or found.empty
            assert not text or any(low <= ord(text[0]) <= high for low, high in found.first)
            assert all(any(low <= ord(char) <= high for low, high in found.any) for char in text)


@pytest.mark.parametrize(
    "pattern", [r"^[~/][a-z/]+$", r"^([a-z_]\w*)?\$\{\w+\}$", r"\.js$", r"^a{2,3}(b|c)?$", r"^$", r"^é+$"]
)
def test_a_plain_text_is_one_of_the_language(pattern: str) -> None:
    text = plain_text(pattern_node(pattern))
    assert text is not None and matches(pattern_node(pattern), text)


def test_a_plain_text_is_as_long_as_asked_for_where_it_may_be() -> None:
    assert plain_text(pattern_node("^[b-d]*$"), 3) == "bbb" and plain_text(pattern_node("^[b-d]{0,2}$"), 3) == "bb"
    assert plain_text(pattern_node("^b{3}$")) == "bbb" and plain_text(pattern_node("^b{500}$")) is None
