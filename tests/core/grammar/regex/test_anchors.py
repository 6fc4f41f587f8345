"""Beside free text a repeat takes no more states than its least asks for, and matches the same."""

from __future__ import annotations

import itertools
import re

import pytest

from graftlm.core.grammar.automata.products import product
from graftlm.core.grammar.regex.parser import parse

TEXTS = ["".join(text) for length in range(6) for text in itertools.product("ab1", repeat=length)]


@pytest.mark.parametrize(
    "pattern",
    [
        *("a[ab]{1,128}", "[ab]{2,3}1", "^a?b{1,3}", "(?:ab?){1,3}$", "(?:a|b{2,}|)1?", "(?:a?b){2,4}(?:1|a*)", "1{0}"),
        *(
            "^(?:a|ab{2,3})",
            "(?:a{2,3}|^b)(?:1{2,}|$)",
            "a*",
            "(?:b+a+){2,}",
            "(?:(?:a|b*1){1,2}b{3}){1,9}",
            "a{2,}(?=b)",
            "^a|b1|a{3}$|^1a$|bb(?!a)|^(?=b)",
        ),
    ],
)
def test_a_pattern_that_is_searched_for_is_found_where_re_finds_it(pattern: str) -> None:
    found = parse(pattern, search=True, portable=True)
    assert [text for text in TEXTS if product.matches(found, text)] == [
        text for text in TEXTS if re.search(pattern, text)
    ]


@pytest.mark.parametrize(
    ("pattern", "most_states"), [("[a-z][a-z0-9]{1,128}", 30), ("^[a-z]{3,5000}", 20), ("([a-z]-?){1,5000}[0-9]", 40)]
)
def test_a_long_repeat_at_a_free_end_takes_few_states(pattern: str, most_states: int) -> None:
    assert len(product.product(parse(pattern, search=True)).rows) <= most_states


def test_alternatives_share_the_text_around_them() -> None:
    words = "linux|windows|vmware|switch|storage|network|blade|solaris|oracle|tru64|aix|osf|vms|esx"
    found = parse(f"^management$|{words}|^out", search=True)
    assert len(product.product(found).rows) < 500  # with texts of their own: over 20,000, for each set of words
