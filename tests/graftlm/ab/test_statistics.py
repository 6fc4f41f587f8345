from __future__ import annotations

import math
import random

import pytest

from graftlm.ab.statistics import ratio


def test_the_ratio_is_the_median_over_rounds() -> None:
    found = ratio([2.0, 2.0, 9.0], [1.0, 1.0, 3.0])
    assert found.value == pytest.approx(2.0)
    assert found.low is not None and found.high is not None and found.low <= 2.0 < found.high


def test_equal_rounds_have_an_interval_of_no_width() -> None:
    found = ratio([3.0, 3.0, 3.0], [2.0, 2.0, 2.0])
    assert (found.low, found.high) == (pytest.approx(1.5), pytest.approx(1.5))


def test_one_round_has_no_interval() -> None:
    found = ratio([2.0], [1.0])
    assert (found.low, found.high) == (None, None)
    assert str(found) == "2.00x"


def test_the_interval_holds_the_true_ratio_in_19_of_20_measurements() -> None:
    rng = random.Random(1)
    held = 0
    for _ in range(200):
        noise = [rng.lognormvariate(0, 0.2) for _ in range(8)]
        found = ratio([3 * x for x in noise[:4]], noise[4:])
        assert found.low is not None and found.high is not None
        held += found.low <= 3 <= found.high
    assert held >= 190


def test_rounds_that_follow_a_drifting_load_give_a_wider_interval() -> None:
    rng = random.Random(2)
    held = 0
    for _ in range(200):
        drift, rounds = rng.gauss(0, 0.2), []
        for _ in range(20):  # each round's load is mostly that of the round before
            rounds.append(3 * math.exp(drift))
            drift = 0.7 * drift + rng.gauss(0, 0.14)
        found = ratio(rounds, [1.0] * 20)
        assert found.low is not None and found.high is not None
        held += found.low <= 3 <= found.high
    assert held >= 165  # 121 where rounds count as independent
