"""Lookbehinds, boundaries of words and lookaheads in repeats mean what they mean in Python's `re`."""

from __future__ import annotations

import itertools
import re

import pytest

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.automata.products import product
from graftlm.core.grammar.budget import limited
from graftlm.core.grammar.regex.regex import parse
from graftlm.core.grammar.spec import Limits

TEXTS = ["".join(text) for length in range(5) for text in itertools.product("ab- c", repeat=length)]

PATTERNS = [
    "(?<=a)b",
    "(?<!a)b",
    "(?<=a(?:b| ))c",
    r"\bab\b",
    r"a\b",
    r"\b",
    r"\B",
    r"\bb\B",
    "(?:a(?=b)|b)*c",
    "^(?:a(?!b)){2}$",
    "^([ab]|[ab]([ab-](?!--))*[ab])$",
    "^(?!aa)(.*?)(?<!bb)$",
    r"^(a\b|b\B|-)+$",
    "(?:(?<!a)b|a)+$",
    "^(?!-)(?!.*--)[ab-]+(?<!-)$",
    r"(a(?=.*b$)|b)+\b",
    "b*(?!^ab$)$",
    "c(?<=^c)",
    r"^(?!.*\bab\b)[abc -]*$",
    "(?!a(?=b))[ab]+c",
    "(?!a(?!b)).c",
    "(?<!a(?=b)).b",
    r"(?<=\b[ab])-",
    "(?<=a(?<=(?<!b)a)b)c",
    "(?<=a(?=b-)b)-",
    r"(?<!a(?!b)\Z)b*",
    r"(?!(?:a(?=b)|b\b)*c)[abc]+$",
    "(?:^a|b|(?<!^)c)+$",
    r"(?<=(?!a\b)\w)-",
    r"^[ab]{1,2}[b-]{1,2}\b([ c-]*)$",
    r"^(a|-)[b-]+\B.\b",
    r"[ab]*a\B-?(?<!-)c|b\b",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_lookarounds_hold_where_they_hold_in_re(pattern: str) -> None:
    found = parse(pattern, search=True)
    assert [text for text in TEXTS if product.matches(found, text)] == [
        text for text in TEXTS if re.search(pattern, text)
    ]


def test_an_end_of_the_text_in_a_lookbehind_is_that_of_re() -> None:
    texts = ["".join(text) for length in range(4) for text in itertools.product("ab\n", repeat=length)]
    for pattern in ("a(?<=a$)\n?", "[ab]+(?<!^a$)\n?"):
        found = parse(pattern)
        assert [text for text in texts if product.matches(found, text)] == [
            text for text in texts if re.fullmatch(pattern, text)
        ]


@pytest.mark.parametrize("pattern", ["a+(?<!aa)", r"\b[ab]+\b", "(?:a(?=b)|b)*"])
def test_the_whole_text_is_held_to_lookarounds_too(pattern: str) -> None:
    found = parse(pattern)
    assert [text for text in TEXTS if product.matches(found, text)] == [
        text for text in TEXTS if re.fullmatch(pattern, text)
    ]


def test_a_boundary_that_dialects_do_not_share_is_kept_out_or_in() -> None:
    narrow, wide = (parse(r"^a\b", search=True, portable=True, wide=wide) for wide in (False, True))
    assert [product.matches(narrow, text) for text in ("a", "a-", "ab", "aé")] == [True, True, False, False]
    assert [product.matches(wide, text) for text in ("a", "a-", "ab", "aé")] == [True, True, False, True]


@pytest.mark.parametrize("text", ["«a»", "“a”", "a…", "(a)", "a 😀"])
def test_signs_beyond_ascii_end_words(text: str) -> None:
    assert product.matches(parse(r"\ba\b", search=True, portable=True), text)


def test_a_word_boundary_takes_few_states() -> None:
    assert len(product.product(parse(r"\ba\b", search=True, portable=True)).rows) < 200


def test_a_refused_end_is_also_one_before_the_last_line_break() -> None:
    found = parse(r"^(?!a$)[a\n]*$", search=True, portable=True)
    assert [product.matches(found, text) for text in ("a", "a\n", "aa", "a\n\n")] == [False, False, True, True]


def test_a_lookbehind_that_takes_too_many_states_is_an_error() -> None:
    with pytest.raises(GrammarError, match="more than 20,000 states; look less far"):
        parse("(?<=a.{14})b", search=True)


def test_ways_that_would_take_too_much_memory_are_an_error() -> None:
    with pytest.raises(GrammarError, match="bytes to compile"), limited(Limits(seconds=60, memory_bytes=20_000_000)):
        parse(r"($\n?)*" * 20)


def test_the_same_place_many_times_is_that_place() -> None:
    assert parse(r"\b" * 3000 + "a") == parse(r"\ba")


def test_a_boundary_after_a_character_takes_no_threads() -> None:
    parse(r"https?://[a-z.]{1,30000}\.[a-z()]{1,6}\b[a-z()/]*")  # as threads it was too large
