from __future__ import annotations

from itertools import product as texts_of

import pytest

from graftlm.core.grammar import ast
from graftlm.core.grammar.automata.matching import matches
from graftlm.core.grammar.automata.products import product
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
    letters = ast.star(ast.chars("ab"))
    walk = ast.Graph(
        (((ast.literal("a"), 1), (letters, 2)), ((ast.EMPTY, 0), (ast.literal("b"), 2)), ()), frozenset({2})
    )
    even = ast.repeat(ast.concat(ast.ANY_CHAR, ast.ANY_CHAR), 1)
    for node in (
        ast.Intersection((walk, even)),
        ast.Difference(walk, even),
        ast.concat(ast.literal("a"), ast.Difference(letters, ast.literal("ab")), ast.literal("b")),
        ast.concat(product.product(ast.Intersection((letters, even))), ast.literal("b")),
    ):
        for length in range(6):
            for chosen in texts_of("ab", repeat=length):
                text = "".join(chosen)
                assert matches(node, text) == product.matches(node, text), (node, text)


def test_many_repeats_of_what_may_be_empty_end_at_once() -> None:
    assert matches(ast.repeat(ast.optional(ast.literal("a")), 10**9, 10**9), "aaa")
    assert not matches(ast.repeat(ast.literal("a"), 10**9, 10**9), "aaa")
