"""What a token costs is learnt from the steps."""

from itertools import cycle, islice

import pytest

from graftlm.core.scheduling.step_times import StepTimes


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
