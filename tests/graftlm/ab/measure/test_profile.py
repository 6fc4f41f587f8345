from __future__ import annotations

from typing import Any

import pytest

from graftlm.ab.measure.meter import Meter
from graftlm.ab.measure.profile import (
    FRAMEWORK,
    Call,
    Fingerprint,
    by_phase,
    first_difference,
    num_unique,
    outside,
)  # fmt: skip


def test_first_token_and_the_time_between_tokens() -> None:
    call = Call(1.0, end_s=3.0, first_s=1.5, num_tokens=4)
    assert (call.to_first_s, call.between_s) == (0.5, 0.5)
    assert (Call(1.0, 2.0).to_first_s, Call(1.0, 2.0, 1.5, 1).between_s) == (None, None)


def test_shared_prefixes_are_computed_once_and_the_last_token_of_each_prompt_again() -> None:
    assert num_unique([[1, 2, 3], [1, 2, 4], [1, 2, 3]]) == 3 + 1 + 1


def test_the_tokens_of_an_answer_need_no_prefill_where_a_prompt_continues_it() -> None:
    """The best hit rate was below the measured one: a form that is filled in goes on from its own answers."""
    assert num_unique([[1, 2], [1, 2, 3, 4, 5]], [[3, 4], []]) == 2 + 2  # 4 was sampled, but never run


def test_time_outside_calls_is_the_framework_s() -> None:
    assert outside(10.0, [Call(5, 7), Call(1, 3), Call(2, 4)]) == pytest.approx(10 - 3 - 2)
    assert outside(2.0, []) == 2.0


def test_prefixes_that_are_computed_ahead_are_no_time_of_the_framework() -> None:
    """Their time was counted twice, as prefill and as the framework's, and the first line blamed the pipeline."""
    meter = Meter()
    meter._ended_ahead(ahead := Call(0.0), None, None)
    ahead.end_s = 0.7
    meter._calls = [Call(0.7, 0.9)]
    profile = meter.profile(0.0, 1.0)
    assert profile.outside_s == profile.phases[FRAMEWORK] == pytest.approx(0.1)


def test_the_first_difference_is_looked_for_in_calls_of_the_same_prompt() -> None:
    ours = [Call(0, prompt_ids=[1], token_ids=[5, 6]), Call(1, prompt_ids=[2], token_ids=[7, 8, 9])]
    theirs = [Call(0, prompt_ids=[2], token_ids=[7, 8, 1]), Call(1, prompt_ids=[1], token_ids=[5, 6])]
    assert first_difference(ours, theirs) == (1, 2)
    assert first_difference(ours, ours) is None
    assert first_difference(ours, [Call(0, prompt_ids=[1], token_ids=[5])]) == (0, 1)


def test_phases_of_several_threads_are_counted_once() -> None:
    spent = [("prefill", 0.0, 2.0), ("decode", 1.0, 4.0), ("decode", 1.5, 3.0), ("prefill", 6.0, 7.0)]
    assert by_phase(spent) == {"prefill": 3.0, "decode": 2.0}


def of(*prompts: Any) -> int | None:
    fingerprint = Fingerprint()
    for prompt in prompts:
        fingerprint.add(prompt)
    return fingerprint.value


def test_prompts_are_told_apart_whatever_their_order() -> None:
    assert of() is None
    assert of("one", [1, 2]) == of([1, 2], "one") != of("one", [1, 3])
    assert of("one") != of("one", "one")


def test_the_text_of_messages_counts_and_their_ids_do_not() -> None:
    def body(text: str, number: str) -> bytes:
        return f'{{"messages": [{{"content": "{text}", "tool_call_id": "{number}"}}]}}'.encode()

    assert of(body("It is 12:30", "call_1")) == of(body("It is 12:30", "call_2")) != of(body("It is 12:31", "call_1"))
