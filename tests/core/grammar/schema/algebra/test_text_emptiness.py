"""Whether string schemas admit any text, told with and without an automaton."""

from __future__ import annotations

from itertools import combinations, product as all_of

import pytest

from graftlm.core.grammar.automata.products import product
from graftlm.core.grammar.schema.algebra import text_language
from graftlm.core.grammar.schema.algebra.shapes import Text

PATTERNS = (r"^[a-z]+$", r"^\$\{\w+\}$", r"^/.*$", r"b", r"^https?://.+$", r"^.{3}$")
BOUNDS = ((0, None), (2, 4), (9, None), (0, 1))


def by_automaton(shape: Text) -> bool:
    return not product.has_length(text_language._combined(*parts(shape), Text()), shape.min_length, shape.max_length)


def parts(shape: Text) -> tuple[list[text_language.Node], list[text_language.Node]]:
    return text_language._parts(shape), text_language._refused(shape)


@pytest.mark.parametrize(("patterns", "bounds"), list(all_of(combinations(PATTERNS, 2), BOUNDS)))
def test_two_patterns_admit_what_their_product_does(patterns: tuple[str, str], bounds: tuple[int, int | None]) -> None:
    for shape in (
        Text(*bounds, patterns=patterns),
        Text(*bounds, patterns=patterns[:1], no_patterns=patterns[1:]),
        Text(*bounds, patterns=patterns[:1], formats=("uri",)),
        Text(*bounds, no_patterns=patterns, no_texts=('"a"', '""')),
    ):
        assert text_language.is_empty(shape) == by_automaton(shape), shape


def test_a_pattern_that_is_excluded_leaves_nothing() -> None:
    assert text_language.is_empty(Text(patterns=("^a", "b$"), no_patterns=("b$",)))


def test_a_text_that_is_left_out_is_not_admitted_however_it_is_spelled() -> None:
    shape = Text(no_patterns=("^x",), no_texts=('"\\u0061"', '"b"'))
    assert [text for text in ("a", "b", "c", "x") if text_language.admits(shape, text)] == ["c"]
