"""The order in which sequences run, on a prefix cache without any model."""

from collections.abc import Callable, Iterable

import numpy as np
from hypothesis import given, settings, strategies as st

from graftlm.core.config import CacheConfig, EngineConfig, SamplingParams, SchedulerConfig
from graftlm.core.execution.step_plan import ScheduledRow
from graftlm.core.kv.pages import coalesce
from graftlm.core.kv.prefix_cache import PIECE, PrefixCache
from graftlm.core.metrics import Counters
from graftlm.core.prompt_input import PromptInput
from graftlm.core.request import Request, Submission
from graftlm.core.scheduling.scheduler import Scheduler
from graftlm.core.sequence import Bounds, Sequence, SequenceGroup
from graftlm.core.serving.stream import StreamListener


class Bench:
    """A scheduler with a clock that stands still, and steps that only pretend to compute."""

    def __init__(
        self,
        slots: int = 1000,
        policy: str = "lpm",
        max_age_s: float = 2.0,
        max_step_tokens: int = 2048,
        **options: object,
    ) -> None:
        schedule = SchedulerConfig(policy=policy, max_age_s=max_age_s)
        self.now = 0.0
        self.cache = PrefixCache(slots, CacheConfig())
        config = EngineConfig(schedule=schedule, **options)
        self.scheduler = Scheduler(config, self.cache, max_step_tokens, Counters(), lambda: self.now)

    def add(self, *tokens: int, max_tokens: int = 4, stream: bool = False) -> Sequence:
        request = Request(list(tokens), SamplingParams(max_tokens=max_tokens), stream=stream)
        submission = Submission(request, StreamListener(), PromptInput(np.array(tokens, np.int32)))
        (sequence,) = SequenceGroup.of(submission).sequences
        sequence.arrived_s, sequence.bounds = self.now, Bounds(max_tokens)
        self.scheduler.add([sequence])
        return sequence

    def step(self, *, check: bool = True) -> list[ScheduledRow]:
        rows = self.scheduler.schedule()
        for sequence, num_new, num_logits in [(r.sequence, r.num_new, r.num_logits) for r in rows]:
            sequence.progress.num_computed += num_new
            self.cache.publish(sequence)
            if num_logits:
                sequence.tokens.append(1000 + sequence.request.id % 50)
                if sequence.remaining <= 0:
                    self.scheduler.remove(sequence, publish=True)
        if check:
            self.cache.check_integrity(self.scheduler.running)
        return rows

    def run(self) -> int:
        steps = 0
        while not self.scheduler.idle:
            self.step()
            steps += 1
            assert steps < 5000, "the scheduler does not end"
        return steps

    def steps_until_it_starts(
        self,
        waiting: Sequence,
        newcomer: Callable[[], Iterable[int]],
        *,
        max_tokens: int,
        tick_s: float,
        limit_s: float,
    ) -> int:
        """Add a newcomer before each step, `tick_s` apart, until `waiting` starts, which has to be before `limit_s`."""
        steps = 0
        while waiting.progress.status == "waiting":
            self.add(*newcomer(), max_tokens=max_tokens)
            self.step()
            self.now += tick_s
            steps += 1
            assert self.now < limit_s, "newcomers starve it"
        return steps


def test_a_prompt_larger_than_the_step_budget_runs_in_chunks() -> None:
    bench = Bench(max_step_tokens=4)
    bench.add(*range(10))
    assert [row.num_new for _ in range(3) for row in bench.step()] == [4, 4, 2]


def test_decode_rows_run_beside_a_prefill_chunk() -> None:
    bench = Bench(max_step_tokens=4)
    first = bench.add(1, 2, 3)
    bench.step()
    second = bench.add(*range(50, 60))
    assert [(row.sequence, row.num_new) for row in bench.step()] == [(first, 1), (second, 4)]


def test_rows_that_decode_take_nothing_of_the_budget_of_prompts() -> None:
    bench = Bench(max_step_tokens=8)
    early = [bench.add(100 + i, 200 + i, max_tokens=9) for i in range(4)]
    bench.step()
    late = [bench.add(*range(10 * i, 10 * i + 4)) for i in range(30, 33)]
    assert [(row.sequence, row.num_new) for row in bench.step()] == [(s, 1) for s in early] + [(s, 4) for s in late[:2]]
    assert [(row.sequence, row.num_new) for row in bench.step()][-1] == (late[2], 4)


def test_a_streamed_answer_waits_for_fewer_prompt_tokens() -> None:
    for stream, beside in ((True, [8, 8, 8, 32, 8]), (False, [32, 32])):
        bench = Bench(max_step_tokens=32, max_mixed_tokens=8)
        first = bench.add(1, 2, stream=stream)
        bench.step()
        bench.add(*range(100, 164), max_tokens=1)
        prompts = [[row.num_new for row in bench.step() if row.sequence is not first] for _ in beside]
        assert prompts == [[num_new] for num_new in beside]


def test_a_streamed_prompt_that_is_still_computed_slows_no_other() -> None:
    bench = Bench(max_step_tokens=32, max_mixed_tokens=8)
    bench.add(*range(64), max_tokens=1, stream=True), bench.add(*range(100, 140), max_tokens=1)
    assert [sum(row.num_new for row in bench.step()) for _ in range(4)] == [32, 32, 32, 8]


def test_the_end_of_a_prompt_that_barely_misses_its_step_runs_with_it() -> None:
    bench = Bench(max_step_tokens=32)
    fits, misses = bench.add(*range(100, 134), max_tokens=1), bench.add(*range(200, 235), max_tokens=1)
    assert [(row.sequence, row.num_new) for row in bench.step()] == [(fits, 34)]
    assert [(row.sequence, row.num_new) for row in bench.step()] == [(misses, 32)]
    assert [(row.sequence, row.num_new) for row in bench.step()] == [(misses, 3)]


def test_no_prompt_starts_in_a_step_that_is_full() -> None:
    bench = Bench(max_step_tokens=32)
    first, second = bench.add(*range(100, 132), max_tokens=1), bench.add(*range(200, 232), max_tokens=1)
    assert [[row.sequence for row in bench.step()] for _ in range(2)] == [[first], [second]]


def test_slots_of_a_full_pool_lie_in_few_extents() -> None:
    bench, rng, extents = Bench(slots=16_000, max_batch=32), np.random.default_rng(0), []
    for _ in range(12):
        answers = [bench.add(*rng.integers(0, 1 << 20, 200).tolist(), max_tokens=100) for _ in range(32)]
        while not bench.scheduler.idle:
            if len(answers[-1].tokens) == 299:  # 300 are the end
                held = [len(coalesce([*answer.kv.shared, *answer.kv.own])) for answer in answers]
                extents.append(sum(held) / len(held))
            bench.step(check=False)
        bench.cache.check_integrity([])
    assert len(extents) == 12
    assert max(extents) <= 2 + 300 / PIECE, extents  # before the last step of each round


def test_siblings_wait_for_the_leader_and_join_when_its_prefix_is_published() -> None:
    bench = Bench()
    shared = list(range(40))
    leader, follower = bench.add(*shared, 100, 101), bench.add(*shared, 200, 201)
    assert [row.sequence for row in bench.step()] == [leader]
    assert [(row.sequence, row.num_new) for row in bench.step()] == [(leader, 1), (follower, 2)]
    assert follower.progress.num_reused == 40


def test_siblings_of_several_leaders_wait_where_their_prefixes_begin_with_the_same_tokens() -> None:
    bench = Bench()
    families = [[*range(8), *range(start, start + 32)] for start in (100, 200)]  # a template that both begin with
    leaders = [bench.add(*family, 300) for family in families]
    followers = [bench.add(*family, 301 + i) for i in range(3) for family in families]
    assert [row.sequence for row in bench.step()] == leaders
    bench.step()
    assert {follower.progress.num_reused for follower in followers} == {40}


def test_strangers_do_not_wait_for_each_other() -> None:
    bench = Bench()
    bench.add(*range(40)), bench.add(*range(100, 140))
    assert len(bench.step()) == 2


def test_the_longest_cached_prefix_goes_first() -> None:
    bench = Bench(max_batch=1)
    bench.add(*range(30), max_tokens=1)
    bench.run()
    bench.add(*range(500, 530))
    cached = bench.add(*range(30), 99)
    assert bench.step()[0].sequence is cached


def test_fcfs_keeps_the_order_of_arrival() -> None:
    bench = Bench(max_batch=1, policy="fcfs")
    bench.add(*range(30), max_tokens=1)
    bench.run()
    first = bench.add(*range(500, 530))
    bench.add(*range(30), 99)
    assert bench.step()[0].sequence is first


def test_a_stream_of_cache_friendly_newcomers_cannot_starve_an_old_request() -> None:
    bench = Bench(max_batch=1, max_age_s=2.0)
    bench.add(*range(30), max_tokens=1)
    bench.run()
    stranger = bench.add(*range(500, 530), max_tokens=1)
    waited = bench.steps_until_it_starts(stranger, lambda: (*range(30), 99), max_tokens=1, tick_s=0.1, limit_s=2.5)
    assert waited > 1  # the others did go first for a while


def test_the_youngest_is_retracted_when_slots_run_out() -> None:
    bench = Bench(slots=180)
    old = bench.add(1, 2, 3, max_tokens=100)
    bench.now = 1.0
    young = bench.add(7, 8, 9, max_tokens=100)
    for _ in range(100):
        if bench.scheduler.counters.retracted == 0:
            bench.step()
    assert (old.progress.status, young.progress.status) == ("running", "waiting")
    assert young.tokens[:3].tolist() == [7, 8, 9] and young.num_generated > 0
    bench.run()
    assert (old.num_generated, young.num_generated) == (100, 100)


def test_a_request_that_pins_leave_no_room_for_fails_instead_of_waiting_for_ever() -> None:
    bench = Bench(slots=20)
    bench.add(*range(16), max_tokens=1)
    bench.run()
    bench.cache.tree.lock(bench.cache.tree.match(np.arange(16, dtype=np.int32)).node)
    bench.add(*range(100, 110), max_tokens=1)
    assert bench.step() == []
    (failure,) = bench.scheduler.failures
    assert "pinned" in str(failure.error)
    assert bench.scheduler.idle


def test_the_token_whose_logits_are_wanted_is_never_taken_from_the_cache() -> None:
    bench = Bench()
    bench.add(*range(20), max_tokens=1)
    bench.run()
    again = bench.add(*range(20), max_tokens=1)
    (row,) = bench.step()
    assert (row.num_new, row.num_logits, again.progress.num_reused) == (1, 1, 19)


prompts = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=12), st.integers(1, 9)), min_size=1, max_size=14
)


@settings(max_examples=120)
@given(prompts, st.integers(24, 60), st.integers(1, 9), st.integers(1, 6), st.sampled_from(["lpm", "fcfs", "random"]))
def test_everything_ends_and_every_slot_comes_back(
    wanted: list[tuple[list[int], int]], slots: int, budget: int, max_batch: int, policy: str
) -> None:
    bench = Bench(slots=slots, policy=policy, max_step_tokens=budget, max_batch=max_batch)
    sequences = [bench.add(*tokens, max_tokens=new) for tokens, new in wanted]
    bench.run()
    assert [s.num_generated for s in sequences] == [new for _, new in wanted]
    assert bench.cache.num_in_use == 0


def test_waiting_sequences_stay_in_order_of_arrival_however_they_come_to_wait() -> None:
    bench = Bench(max_batch=2, policy="fcfs")
    early = bench.add(*range(30), max_tokens=9)
    bench.now = 1.0
    held = bench.add(*range(100, 130), max_tokens=9)
    bench.step()
    bench.now = 2.0
    late = bench.add(*range(200, 230))
    bench.scheduler.hold(held)
    bench.scheduler._retract(early)
    bench.scheduler.resume(held, 0)  # used to go first, and insort then took the list for sorted
    assert bench.scheduler.waiting == [early, held, late]
    sibling = Sequence(early.request, early.prompt, index=1, arrived_s=early.arrived_s, bounds=early.bounds)
    bench.scheduler.add([sibling])
    assert bench.scheduler.waiting == [early, sibling, held, late]
    bench.run()


def test_newcomers_with_long_answers_and_short_prompts_cannot_starve_an_old_request() -> None:
    bench, rng = Bench(max_batch=1, max_age_s=2.0), np.random.default_rng(0)
    stranger = bench.add(*range(500, 600), max_tokens=1)
    bench.now = 0.05
    waited = bench.steps_until_it_starts(
        stranger, lambda: rng.integers(1000, 1 << 20, 3).tolist(), max_tokens=2, tick_s=0.01, limit_s=1.0
    )
    assert waited > 1  # those that arrived with it did go first


def test_a_burst_ends_with_its_longest_answer_and_little_later() -> None:
    """The longest answer is handed over last: in order of arrival it would run on alone, 100 steps and more."""
    bench = Bench(slots=20_000, max_step_tokens=64)
    for start in range(1000, 101_000, 1000):
        bench.add(*range(start, start + 64), max_tokens=4)
    bench.add(*range(64), max_tokens=150)
    assert bench.run() <= 160
