from __future__ import annotations

from hypothesis import given, strategies as st

from graftlm.core.program.batch import common_prefix


def test_the_common_prefix_ends_at_the_first_difference() -> None:
    assert common_prefix([[1, 2, 3, 4], [1, 2, 9, 4], [1, 2, 3]]).tolist() == [1, 2]


def test_a_prompt_that_is_the_beginning_of_the_others_is_the_prefix() -> None:
    assert common_prefix([[1, 2, 3], [1, 2]]).tolist() == [1, 2]


def test_of_nothing_nothing_is_common() -> None:
    assert common_prefix([]).tolist() == []
    assert common_prefix([[1], []]).tolist() == []


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=4))
def test_the_prefix_is_common_and_no_longer_one_is(prompts: list[list[int]]) -> None:
    prefix = common_prefix(prompts).tolist()
    assert all(prompt[: len(prefix)] == prefix for prompt in prompts)
    longer = {tuple(prompt[: len(prefix) + 1]) for prompt in prompts}
    assert len(longer) > 1 or any(len(prompt) == len(prefix) for prompt in prompts)
