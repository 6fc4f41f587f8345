from __future__ import annotations

import numpy as np

from graftlm.core.config import CacheConfig, SamplingParams
from graftlm.core.kv.prefix_cache import PrefixCache
from graftlm.core.prompt_input import PromptInput
from graftlm.core.request import Request
from graftlm.core.scheduling.checkpoints import INTERVAL, Checkpoints
from graftlm.core.sequence import Sequence


def sequence_of(ids: list[int], n: int = 1, namespace: str = "") -> Sequence:
    request = Request(ids, SamplingParams(n=n, temperature=1.0), namespace=namespace)
    return Sequence(request, PromptInput(np.array(ids, np.int32)))


def started(sequence: Sequence, waiting: list[Sequence], page_size: int = 1) -> Checkpoints:
    checkpoints = Checkpoints(PrefixCache(100_000, CacheConfig(page_size=page_size), num_states=8))
    sequence.progress.status = "running"
    checkpoints.start(sequence, waiting)
    return checkpoints


def stops(checkpoints: Checkpoints, sequence: Sequence) -> list[int]:
    """Return the ends of all steps before the last one, for steps of any length."""
    found, past, total = [], 0, sequence.num_tokens
    while past < total:
        past += checkpoints.clip(sequence, past, total - past)
        found.append(past)
    return [place for place in found if checkpoints.due(sequence, place)]


def test_a_prefill_stops_where_waiting_prompts_part_from_it() -> None:
    leader = sequence_of(list(range(50)))
    waiting = [sequence_of([*range(20), 99]), sequence_of([*range(40), 99]), sequence_of([7, 8, 9])]
    checkpoints = started(leader, waiting)
    assert stops(checkpoints, leader) == [20, 40]
    assert [checkpoints.waits(one, 0) for one in waiting] == [True, True, False]
    leader.progress.num_computed = 20
    assert [checkpoints.waits(one, 0) for one in waiting] == [False, True, False]


def test_places_near_each_other_share_a_checkpoint() -> None:
    leader = sequence_of(list(range(50)))
    waiting = [sequence_of([*range(length), 99]) for length in (20, 22, 25)]
    checkpoints = started(leader, waiting)
    assert stops(checkpoints, leader) == [20]
    assert all(checkpoints.waits(one, 0) for one in waiting)


def test_a_sequence_that_arrives_later_is_compared_before_the_next_step() -> None:
    leader, late = sequence_of(list(range(50))), sequence_of([*range(30), 99])
    checkpoints = started(leader, [])
    assert stops(checkpoints, leader) == []
    checkpoints.look([late])
    assert stops(checkpoints, leader) == [30]
    assert checkpoints.waits(late, 0)


def test_a_long_prompt_keeps_a_state_before_its_last_token() -> None:
    assert stops(started(one := sequence_of([5] * 64), []), one) == [63]
    assert stops(started(one := sequence_of([5] * 63), []), one) == []


def test_several_answers_keep_a_state_after_the_prompt() -> None:
    assert stops(started(one := sequence_of([5] * 10, n=2), []), one) == [10]


def test_a_very_long_prompt_keeps_a_state_at_intervals() -> None:
    one = sequence_of([5] * (2 * INTERVAL + 100))
    assert stops(started(one, []), one) == [INTERVAL, 2 * INTERVAL + 99]


def test_checkpoints_lie_at_ends_of_pages() -> None:
    leader = sequence_of(list(range(50)))
    assert stops(started(leader, [sequence_of([*range(22), 99])], page_size=4), leader) == [20]


def test_another_namespace_shares_nothing() -> None:
    leader = sequence_of(list(range(50)))
    assert stops(started(leader, [sequence_of([*range(20), 99], namespace="b")]), leader) == []


def test_prompts_that_end_like_one_whose_next_turn_parted_early_keep_a_state_before_that_tail() -> None:
    cache = PrefixCache(100_000, CacheConfig(), num_states=8)
    checkpoints, tail = Checkpoints(cache), [91, 92, 93]

    def turn(ids: list[int]) -> list[int]:
        sequence = sequence_of(ids)
        sequence.progress.status = "running"
        sequence.progress.num_computed = cache.start(sequence)
        checkpoints.start(sequence, [])
        found = stops(checkpoints, sequence)
        assert cache.reserve(sequence, sequence.num_tokens)
        sequence.progress.num_computed = sequence.num_tokens
        cache.release(sequence, publish=True)
        return found

    first = [*range(30), *range(40, 60)]
    assert turn(first + tail) == []
    assert 50 in turn([*first, 7, *range(100, 130), *tail])  # parts before the tail, and teaches it
    assert turn([200, *range(300, 340), *tail]) == [41]
    assert turn([201, *range(300, 340)]) == []
