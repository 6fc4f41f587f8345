"""Ranges as regular expressions, against all texts around them."""

from __future__ import annotations

import re

import pytest

from graftlm.core.grammar.pydantic_schema import between_pattern, integer_pattern

BOUNDS = [(0, 0), (1, 20), (-3, 7), (-120, -11), (6, None), (None, -5), (None, None), (99, 101), (-1, 0), (5, 4)]


@pytest.mark.parametrize(("low", "high"), BOUNDS)
def test_integers_are_those_between_the_bounds(low: int | None, high: int | None) -> None:
    pattern = re.compile(integer_pattern(low, high))
    for number in range(-1_200, 1_201):
        inside = (low is None or low <= number) and (high is None or number <= high)
        assert bool(pattern.fullmatch(str(number))) == inside, number
    assert not any(pattern.fullmatch(text) for text in ("", "-", "01", "-0", "+1", "1.0"))
    assert bool(pattern.fullmatch("9" * 18)) == (high is None)


@pytest.mark.parametrize(
    ("low", "high"), [("200", "200"), ("019", "120"), ("000", "999"), ("305", "309"), ("199", "301")]
)
def test_texts_are_those_between_two_others(low: str, high: str) -> None:
    pattern = re.compile(between_pattern(low, high))
    for number in range(1_000):
        assert bool(pattern.fullmatch(f"{number:03}")) == (low <= f"{number:03}" <= high)


def test_what_is_no_digit_stays() -> None:
    pattern = re.compile(between_pattern("2019-12-30", "2021-02-01"))
    for text, inside in {"2019-12-30": 1, "2019-12-29": 0, "2020-06-15": 1, "2021-02-01": 1, "2021-02-02": 0}.items():
        assert bool(pattern.fullmatch(text)) == inside
