"""Ranges as regular expressions, against all texts around them."""

from __future__ import annotations

import itertools
import re
from datetime import timedelta
from decimal import Decimal

import pytest
from pydantic import TypeAdapter

from graftlm.core.grammar.python_types.range_patterns import (
    between_pattern,
    duration_patterns,
    integer_pattern,
    number_pattern,
)

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


def duration(text: str) -> timedelta | None:
    try:
        return TypeAdapter(timedelta).validate_json(f'"{text}"')
    except ValueError:
        return None


@pytest.mark.parametrize(
    ("low", "high"),
    [
        (timedelta(hours=1), timedelta(days=2, minutes=3)),
        (timedelta(seconds=-90), timedelta(seconds=61)),
        (timedelta(microseconds=5), timedelta(seconds=1, microseconds=7)),
        (timedelta(days=-3), timedelta(hours=-5)),
    ],
)
def test_durations_are_those_between_the_bounds(low: timedelta, high: timedelta) -> None:
    spelled, inside = (re.compile(pattern) for pattern in duration_patterns(low, high))
    days, hours, minutes = ("", "1D", "2D", "3D"), ("", "1H", "23H"), ("", "3M", "59M")
    seconds = ("", "1S", "30S", "0.000005S", "1.000007S", "1.000008S")
    found = 0
    for parts in itertools.product(("", "-"), days, hours, minutes, seconds):
        sign, day, *clock = parts
        text = f"{sign}P{day}{'T' if any(clock) else ''}{''.join(clock)}"
        value = duration(text)
        matched = bool(spelled.fullmatch(text) and inside.fullmatch(text))
        assert matched == (value is not None and (day != "" or any(clock)) and low <= value <= high), text
        found += matched
    assert found and not any(pattern.fullmatch(text) for pattern in (spelled,) for text in ("P", "PT", "P1DT", "PT1"))


@pytest.mark.parametrize(
    ("low", "high", "above", "below"),
    [("0", "1", True, True), ("-2.5", None, False, False), (None, "3", False, True), ("-3", "-1", True, False)],
)
def test_numbers_are_between_the_bounds(low: str | None, high: str | None, above: bool, below: bool) -> None:
    bounds = [None if bound is None else Decimal(bound) for bound in (low, high)]
    pattern = re.compile(number_pattern(*bounds, above=above, below=below))
    values = [Decimal(number).scaleb(-2) for number in range(-450, 451)]
    matched = [value for value in values if pattern.fullmatch(f"{value}")]
    inside = [
        value
        for value in values
        if (bounds[0] is None or value > bounds[0] or (value == bounds[0] and not above))
        and (bounds[1] is None or value < bounds[1] or (value == bounds[1] and not below))
    ]
    assert set(matched) <= set(inside) and len(matched) >= 0.8 * len(inside)
