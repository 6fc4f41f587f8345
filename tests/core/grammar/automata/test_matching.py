from __future__ import annotations

from itertools import product as texts_of

import pytest

from graftlm.core.grammar.automata.matching import matches
from graftlm.core.grammar.automata.products import product
from graftlm.core.grammar.nodes import nodes
from graftlm.core.grammar.regex import parser

PATTERNS = [
    *("", "a", "ab|a", "[ab]{2,3}", "(a|ab)(b|)", "(a*)*b", "(a?b?){2}", "(ab?){0,2}", "é|a", "(a|é){2,}", "a+b+"),
    *("^(?!ab)", "a(?=b)", r"\bab", "^ab$", r"\w+é", "(?:a{2})*"),
]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("search", [False, True])
def test_a_node_matches_the_texts_that_its_automaton_accepts(pattern: str, search: bool) -> None:
    node = parser.parse(pattern, search=search)
    for length in range(5):
        for letters in texts_of("abé", repeat=length):
            text = "".join(letters)
            assert matches(node, text) == product.matches(node, text), text


def test_products_and_walks_match_as_their_automata_do() -> None:
    letters = nodes.star(nodes.chars("ab"))
    walk = nodes.Graph(
        (((nodes.literal("a"), 1), (letters, 2)), ((nodes.EMPTY, 0), (nodes.literal("b"), 2)), ()), frozenset({2})
    )
    even = nodes.repeat(nodes.concat(nodes.ANY_CHAR, nodes.ANY_CHAR), 1)
    for node in (
        nodes.Intersection((walk, even)),
        nodes.Difference(walk, even),
        nodes.concat(nodes.literal("a"), nodes.Difference(letters, nodes.literal("ab")), nodes.literal("b")),
        nodes.concat(product.product(nodes.Intersection((letters, even))), nodes.literal("b")),
    ):
        for length in range(6):
            for chosen in texts_of("ab", repeat=length):
                text = "".join(chosen)
                assert matches(node, text) == product.matches(node, text), (node, text)


def test_many_repeats_of_what_may_be_empty_end_at_once() -> None:
    assert matches(nodes.repeat(nodes.optional(nodes.literal("a")), 10**9, 10**9), "aaa")
    assert not matches(nodes.repeat(nodes.literal("a"), 10**9, 10**9), "aaa")
