"""A witness shows that a language is not empty; that none is found shows nothing."""

from __future__ import annotations

from hypothesis import given, settings, strategies as st

from graftlm.core.grammar.automata.products import product
from graftlm.core.grammar.automata.products.witness import has_witness, has_witness_in_parts
from graftlm.core.grammar.nodes import nodes
from graftlm.core.grammar.regex.parser import parse

PATTERNS = st.sampled_from(
    ["a", "a*", "[ab]*", "a[a-z]*", "(ab)+", "[a-z]{2,4}", "x-.*", ".*-y", "(?s:.*)", "b|é+", "[]"]
)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(PATTERNS, min_size=1, max_size=3),
    st.lists(PATTERNS, max_size=3),
    st.sets(st.sampled_from([b"", b"a", b"ab", b"x-", "é".encode()])),
)
def test_a_language_with_a_witness_is_not_empty(passed: list[str], failed: list[str], texts: set[bytes]) -> None:
    items = [nodes.NOTHING if pattern == "[]" else parse(pattern) for pattern in passed]
    minus = [nodes.NOTHING if pattern == "[]" else parse(pattern) for pattern in failed]
    listed = nodes.alternation(*(nodes.literal(text.decode()) for text in texts))
    whole = items[0] if len(items) == 1 else nodes.Intersection(tuple(items))
    found = [has_witness(items, minus, texts), has_witness(items, minus, texts, at_once=True)]
    if any(found) or has_witness_in_parts([whole], minus, texts):
        assert not product.is_empty(nodes.Difference(whole, nodes.alternation(*minus, listed)))


def test_a_witness_is_found_beside_refused_texts() -> None:
    assert has_witness([parse("[a-z]+")], [parse("a.*")], {b"b"})
    assert has_witness([parse("x-.*"), parse("(?s:.*)")], [parse("y.*")], set())


def test_a_witness_has_a_length_within_the_bounds() -> None:
    assert has_witness([parse("[a-z]*"), parse("(?s:.*)")], [parse("a*")], set(), 12, 12)
    assert not has_witness([parse("[a-z]*")], [], set(), 12, 11)
    assert not has_witness([parse("é{2}")], [], set(), 3)
    assert has_witness([parse("é{2}")], [], set(), 2, 2)


def test_a_witness_of_two_patterns_that_are_found_anywhere_has_both_in_it() -> None:
    found_anywhere = [parse("[0-9]{5}", search=True), parse("[a-f]{5}", search=True)]
    assert has_witness(found_anywhere, [], set(), at_once=True)


def test_there_is_no_witness_of_an_empty_language() -> None:
    assert not has_witness([parse("a")], [parse("a*")], set())
    assert not has_witness([parse("ab")], [], {b"ab"})
    assert not has_witness([nodes.NOTHING], [], set())


def test_a_witness_is_found_where_an_automaton_is_too_large() -> None:
    long = nodes.Intersection((parse("[a-z]+(-[a-z]+)*"), parse("(?s:.){1,30000}")))
    assert not has_witness([long], [parse("a*")], {b"0"})
    assert has_witness_in_parts([long], [parse("a*")], {b"0"})
    assert has_witness_in_parts([nodes.Difference(nodes.alternation(parse("b{30000}"), long), parse("a*"))], [], set())
    assert has_witness_in_parts([long, parse("(?s:.{100,})")], [], set(), 100)
    assert not has_witness_in_parts([long, parse("[0-9]+")], [], set())
