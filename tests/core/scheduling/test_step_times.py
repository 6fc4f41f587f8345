"""What a token costs is learnt from the steps."""

from itertools import cycle, islice
from types import SimpleNamespace
from typing import Any

import pytest

from graftlm.core.scheduling.step_times import StepPrices, StepTimes


def learnt(steps: list[tuple[int, float]]) -> StepTimes:
    times = StepTimes()
    for num_tokens, seconds in steps:
        times.add(num_tokens, seconds)
    return times


def line(num_tokens: int) -> float:
    return 0.010 + 0.001 * num_tokens


def test_before_the_first_step_nothing_is_known() -> None:
    assert not StepTimes().known
    assert StepTimes().of(3) == 0.0


def test_one_step_gives_its_own_time_and_a_token_a_small_share_of_it() -> None:
    times = learnt([(1, 0.010)])
    assert times.of(1) == pytest.approx(0.010)
    assert 0 < times.per_token < 0.001


def test_steps_of_several_sizes_give_the_line_through_them() -> None:
    times = learnt([(n, line(n)) for n in islice(cycle((1, 2, 5, 8)), 100)])
    assert times.per_token == pytest.approx(0.001, rel=0.1)
    assert times.of(6) == pytest.approx(line(6), rel=0.02)


def test_a_step_that_was_held_up_changes_little() -> None:
    steps = [(n, line(n)) for n in islice(cycle((1, 2, 5, 8)), 100)]
    assert learnt([*steps, (1, 3.0)]).of(1) == pytest.approx(line(1), rel=0.1)


def test_steps_that_compiled_are_forgotten() -> None:
    times = learnt([(1, 2.5), (1, 0.5), (1, 0.010), (4, 0.012)])
    assert times.of(1) == pytest.approx(0.010, rel=0.1)


def test_a_machine_that_becomes_slower_is_noticed() -> None:
    assert learnt([(1, 0.01)] * 50 + [(1, 0.015)] * 300).of(1) == pytest.approx(0.015, rel=0.05)


def test_a_token_never_costs_less_than_nothing_nor_a_step_less_than_its_tokens() -> None:
    assert learnt([(1, 0.02), (8, 0.011)] * 40).per_token == 0.0
    assert learnt([(1, 0.001), (8, 0.1)] * 40).base >= 0.0


def rows_of(num_rows: int, num_new: int = 1) -> Any:
    rows = [SimpleNamespace(num_new=num_new)] * num_rows
    return SimpleNamespace(num_tokens=num_rows * num_new, rows=rows)


def priced(*steps: tuple[Any, int, float, float]) -> StepPrices:
    """What is learnt of (plan, steps at once, seconds of forward passes, seconds in all)."""
    prices = StepPrices()
    for plan, num_steps, forward_s, seconds in steps:
        prices.ran(plan, num_steps, forward_s)
        prices.ended(seconds)
    return prices


def test_a_step_by_itself_costs_all_that_goes_by_beside_it_and_steps_at_once_share_it() -> None:
    prices = priced((rows_of(1), 1, 0.010, 0.013), (rows_of(1), 10, 0.100, 0.104))
    assert prices.alone(1) == pytest.approx(0.013)
    assert prices.at_once(1, 4) == pytest.approx(0.011)
    assert prices.at_once(1, 16) == pytest.approx(0.01025)


def test_forward_passes_cost_the_same_by_themselves_and_at_once() -> None:
    prices = priced((rows_of(8), 1, 0.010, 0.010), *[(rows_of(8), 16, 16 * 0.030, 0.480)] * 200)
    assert prices.alone(8) == pytest.approx(0.030, rel=0.05)  # the machine became slower while none ran by itself


def test_steps_that_read_prompts_say_nothing_about_a_price() -> None:
    assert not priced((rows_of(1, 9), 1, 0.010, 0.020)).known
    prices = priced((rows_of(1), 1, 0.010, 0.013), (rows_of(1, 9), 1, 0.100, 0.900))
    assert prices.alone(1) == pytest.approx(0.013)


def test_what_held_up_a_step_changes_its_price_little() -> None:
    prices = priced((rows_of(1), 1, 0.010, 0.014), (rows_of(1), 1, 0.010, 3.0))
    assert prices.alone(1) == pytest.approx(0.014, rel=0.05)
    prices = priced((rows_of(1), 1, 0.010, 3.0), (rows_of(1), 1, 0.010, 0.014))
    assert prices.alone(1) == pytest.approx(0.014)
