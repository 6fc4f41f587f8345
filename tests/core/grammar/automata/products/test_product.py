"""Intersections and differences of languages, against matching both."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings, strategies as st

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.automata.dfa import Dfa
from graftlm.core.grammar.automata.products import product
from graftlm.core.grammar.nodes import nodes
from graftlm.core.grammar.regex.parser import parse

WORDS = ["".join(letters) for n in range(6) for letters in itertools.product("ab", repeat=n)]
PATTERNS = st.sampled_from(["a*", "(a|bb)*", "[ab]{2,4}", "a?b+", "", "(ab)*a?", ".*b.*", "b"])


@settings(max_examples=40)
@given(PATTERNS, PATTERNS)
def test_a_product_accepts_what_both_or_only_the_first_accepts(left: str, right: str) -> None:
    a, b = parse(left), parse(right)
    both, first = nodes.Intersection((a, b)), nodes.Difference(a, b)
    for word in WORDS:
        in_a, in_b = product.matches(a, word), product.matches(b, word)
        assert product.matches(both, word) == (in_a and in_b)
        assert product.matches(first, word) == (in_a and not in_b)


@settings(max_examples=40)
@given(PATTERNS, PATTERNS)
def test_no_text_is_shorter_than_the_shortest(left: str, right: str) -> None:
    node = nodes.Difference(parse(left), parse(right))
    found = product.table(node).shortest()
    words = [word for word in WORDS if product.matches(node, word)]
    assert found is None or product.matches(node, found.decode())
    assert not words or (found is not None and len(found) <= len(words[0]))
    assert (found is None) == product.is_empty(node)


def test_a_product_is_part_of_a_larger_language() -> None:
    middle = nodes.Difference(nodes.star(nodes.ANY_CHAR), parse("(?s:.*)END(?s:.*)"))
    whole = nodes.concat(
        nodes.literal("<"), nodes.Graph((((middle, 1), (nodes.EMPTY, 1)), ()), frozenset({1})), nodes.literal("END>")
    )
    dfa = Dfa.compile(product.without_products(whole))
    assert dfa.matches("<é ENEND>".encode())
    assert not dfa.matches(b"<END END>")


def test_a_language_without_products_stays_the_same_node() -> None:
    node = parse("(a|bc{2,}){3}d")
    assert product.without_products(node) is node


def test_emptiness_is_found_out() -> None:
    a, b = nodes.literal("a"), nodes.literal("b")
    assert product.is_empty(nodes.Intersection((a, b))) and product.is_empty(nodes.NOTHING)
    assert not product.is_empty(nodes.Difference(a, b)) and not product.is_empty(nodes.EMPTY)


def test_a_product_over_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "MAX_STATES", 50)
    with pytest.raises(GrammarError, match="more than 50 states"):
        product.product(
            nodes.Intersection((parse("(ab){0,9}"), parse("[ab]{3,17}"), parse("a(?:.|..)*"), parse(".{7}")))
        )


@pytest.mark.parametrize(
    ("pattern", "low", "high", "expected"),
    [
        ("a{3}", 0, 2, False),
        ("a{3}", 3, 3, True),
        ("a{3}|b{7}", 4, 6, False),
        ("(ab)*", 3, 3, False),
        ("(ab)*", 3, None, True),
        ("[é€😀]{2}", 2, 2, True),
        ("[é€😀]{2}", 3, 8, False),
        ("a{3}", 4, None, False),
    ],
)
def test_lengths_are_counted_in_characters(pattern: str, low: int, high: int | None, expected: bool) -> None:
    assert product.has_length(parse(pattern), low, high) is expected


@settings(max_examples=40, deadline=None)
@given(PATTERNS, PATTERNS)
def test_emptiness_agrees_with_the_states_of_the_whole_product(left: str, right: str) -> None:
    a, b = parse(left), parse(right)
    assert product.is_empty(nodes.Intersection((a, b))) == product.product(nodes.Intersection((a, b))).is_nothing
    assert product.is_empty(nodes.Difference(a, b)) == product.product(nodes.Difference(a, b)).is_nothing


def test_emptiness_is_answered_where_the_whole_product_would_have_too_many_states() -> None:
    large = nodes.Intersection((parse("(?:.{300})*"), parse("(?:.{299})*")))
    with pytest.raises(GrammarError, match="more than 20,000 states"):
        product.product(large)
    assert not product.is_empty(large)
