"""The order in which waiting sequences start, on a prefix cache without any model."""

import numpy as np

from graftlm.core.config import CacheConfig, SamplingParams, SchedulerConfig
from graftlm.core.kv.prefix_cache import PrefixCache
from graftlm.core.prompt_input import PromptInput
from graftlm.core.request import Request
from graftlm.core.scheduling.waiting_order import WaitingOrder
from graftlm.core.sequence import Bounds, Sequence

MAX_AGE_S = 2.0


def waits(prompt: int, answer: int, arrived_s: float = 0.0, *, first: int = 0) -> Sequence:
    """A waiting sequence of so many tokens of its own, behind the token `first`."""
    own = np.random.default_rng(prompt * 1000 + answer).integers(1, 1 << 20, prompt - 1)
    ids = np.array([first, *own], np.int32)
    request = Request([], SamplingParams(max_tokens=answer))
    return Sequence(request, PromptInput(ids), arrived_s=arrived_s, bounds=Bounds(answer))


def order(*sequences: Sequence, now: float = 0.0, policy: str = "lpm", running: tuple[Sequence, ...] = ()) -> list[int]:
    """The places among `sequences` of those that may start first, second, and so on."""
    waiting = sorted(sequences, key=lambda s: s.arrived_s)
    config = SchedulerConfig(policy=policy, max_age_s=MAX_AGE_S)
    ordered = WaitingOrder(config, PrefixCache(1000, CacheConfig()), 2048, 256, 0)
    return [sequences.index(one.sequence) for one in ordered.of(waiting, running, now, None)]


def test_long_answers_start_first_and_then_the_shortest_prompts() -> None:
    burst = waits(900, 20), waits(30, 10), waits(500, 400), waits(60, 250), waits(100, 150)
    assert order(*burst) == [2, 3, 1, 4, 0]
    assert order(*burst, policy="fcfs") == [0, 1, 2, 3, 4]


def test_what_runs_counts_where_an_answer_is_held_to_be_long() -> None:
    burst = waits(900, 250), waits(30, 10)
    assert order(*burst) == [0, 1]
    assert order(*burst, running=(waits(40, 1000),)) == [1, 0]


def test_with_one_limit_for_all_the_shortest_prompt_starts_first() -> None:
    assert order(waits(900, 256), waits(30, 256), waits(100, 256)) == [1, 2, 0]


def test_texts_that_begin_alike_by_chance_are_ordered_all_the_same() -> None:
    cache = PrefixCache(1000, CacheConfig())
    done = waits(40, 10, first=7)
    cache.start(done)
    cache.reserve(done, 40)
    done.progress.num_computed = 40
    cache.publish(done)
    alike, other = waits(900, 10, first=7), waits(30, 10, first=8)
    assert [cache.peek(one).length for one in (alike, other)] == [1, 0]
    ordered = WaitingOrder(SchedulerConfig(), cache, 2048, 256, 0).of([alike, other], (), 0.0, None)
    assert [one.sequence for one in ordered] == [other, alike]
    cache.release(done, publish=True)


def test_those_that_arrive_later_do_not_overtake_by_the_lengths_of_prompt_and_answer() -> None:
    early, late = waits(900, 10, 0.0), waits(30, 400, 0.2)
    assert order(early, late, now=0.2) == [0, 1]
    assert order(early, waits(30, 400, 0.1), now=0.2) == [1, 0]  # together, as far as anybody can tell


def test_after_the_age_cap_the_order_is_that_of_arrival() -> None:
    early, long, late = waits(900, 10, 0.01), waits(60, 400, 0.02), waits(30, 400, 1.0)
    assert order(early, long, late, now=1.9) == [1, 0, 2]
    assert order(early, long, late, now=2.5) == [0, 1, 2]


def owned(caller: str, call: str, num: int) -> list[Sequence]:
    sequences = [waits(30 + i, 10) for i in range(num)]
    for sequence in sequences:
        sequence.request.owner = caller, call
    return sequences


def test_a_call_of_many_sequences_lets_others_start_once_it_holds_a_quarter_of_the_batch() -> None:
    many, few = owned("a", "1", 1000), owned("a", "2", 2)
    first = order(*many, *few)[:66]
    assert len([place for place in first if place < 1000]) == 64
    assert {1000, 1001} <= set(first)
    assert order(*many, *few, running=tuple(owned("a", "1", 64)))[:2] == [1000, 1001]


def test_callers_share_whatever_the_number_of_their_calls() -> None:
    many = [sequence for i in range(300) for sequence in owned("a", str(i), 1)]
    few = owned("b", "1", 3)
    first = order(*many, *few)[:67]
    assert set(range(300, 303)) <= set(first)
