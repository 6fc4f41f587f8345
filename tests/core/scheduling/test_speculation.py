"""Rows that carry guesses of their next tokens give what rows without them give."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from numpy.typing import NDArray

from graftlm.core.config import CacheConfig, EngineConfig, SamplingParams
from graftlm.core.errors import ConfigError
from graftlm.core.execution.step_plan import ScheduledRow
from graftlm.core.metrics import Stats
from graftlm.core.prompt_input import PromptInput
from graftlm.core.request import Chunk, Completion, Request, Submission
from graftlm.core.runtime import Runtime
from graftlm.core.scheduling.speculation import AcceptanceRate, Drafter
from graftlm.core.scheduling.step_times import MAX_NEW, StepPrices
from graftlm.core.sequence import Bounds
from tests.models import byte_tokenizer, greedy_reference, random_prompt, tiny_model
from tests.stepping import sequence_of

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["red", "green"]}},
    "required": ["a", "b"],
}
KINDS: list[dict[str, Any]] = [
    GREEDY,
    {"temperature": 0.8, "seed": 3, "max_tokens": 19, "ignore_eos": True},
    {"temperature": 1.1, "seed": 4, "top_k": 7, "max_tokens": 15, "ignore_eos": True},
    {"temperature": 1.0, "seed": 5, "top_p": 0.8, "max_tokens": 11},
    {"temperature": 0.9, "seed": 7, "top_k": 20, "min_p": 0.05, "max_tokens": 10},
    {"temperature": 0, "max_tokens": 24, "repetition_penalty": 1.3, "ignore_eos": True},
    {"temperature": 0, "max_tokens": 24, "frequency_penalty": 0.7, "presence_penalty": 0.3, "ignore_eos": True},
    {"temperature": 0, "max_tokens": 16, "logprobs": True, "top_logprobs": 2, "ignore_eos": True},
    {"temperature": 0, "max_tokens": 16, "logit_bias": {7: 5.0, 40: -100.0}, "ignore_eos": True},
    {"temperature": 1.0, "seed": 8, "max_tokens": 17, "n": 3},
    {"temperature": 1.0, "seed": 9, "max_tokens": 40, "json_schema": SCHEMA},
    {"temperature": 0, "max_tokens": 12, "regex": "[a-f]{3,9}"},
    {"temperature": 0, "max_tokens": 12, "choices": ("red red red", "red red blue")},
    {"temperature": 1.0, "seed": 10, "max_tokens": 30, "min_tokens": 12, "logit_bias": {257: 8.0}},
    {"temperature": 0, "max_tokens": 30, "stop": ("e", "\x11")},
    {"temperature": 0, "max_tokens": 30, "stop_token_ids": (33, 34), "ignore_eos": True},
]
OPTIONS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "chunked": {"max_step_tokens": 24, "max_batch": 6},
    "tight": {"cache": CacheConfig(max_tokens=420), "max_batch": 12},
    "pages": {"cache": CacheConfig(max_tokens=2048, page_size=16)},
    "no cache": {"cache": CacheConfig(max_tokens=2048, enabled=False)},
    "one at a time": {"max_batch": 1},
}


class Free(StepPrices):
    """Tokens cost nothing: whatever is guessed is run."""

    known = True
    per_token = 0.0

    def alone(self, num_tokens: float) -> float:
        return 1.0

    def at_once(self, num_tokens: float, num_steps: int) -> float:
        return 1.0


LookUp = Callable[[NDArray[np.int32], str, int], tuple[int, list[int]]]


def drafting(kind: str = "llama", look_up: LookUp | None = None, **options: Any) -> Runtime:
    """A runtime that runs every guess; `look_up` makes them in place of the drafter's own."""
    options.setdefault("cache", CacheConfig(max_tokens=4096))
    made = Runtime(tiny_model(kind), tokenizer=byte_tokenizer(), **options).load()

    def prepare(engine: Any) -> None:
        engine.drafter.prices = Free()
        if look_up is not None:
            engine.drafter.look_up = look_up

    made._thread.call(prepare)
    return made


def single(kind: str = "llama", **options: Any) -> Runtime:
    options.setdefault("cache", CacheConfig(max_tokens=4096))
    return Runtime(tiny_model(kind), tokenizer=byte_tokenizer(), speculation="off", **options).load()


def repetitive(num: int) -> list[list[int]]:
    """Prompts in which every pair of tokens stands more than once, with a beginning in common."""
    dice = random.Random(num)
    words = [random_prompt(3, seed=i) for i in range(6)]
    start = sum(dice.choices(words, k=12), [])
    return [start + sum(dice.choices(words, k=2 + i % 4), []) for i in range(num)]


def said(completion: Completion) -> list[tuple[Any, ...]]:
    every = completion.completions or [completion]
    return [(c.token_ids, c.text, c.finish_reason, c.stop, c.text_complete) for c in every]


def logprobs(completion: Completion) -> list[float]:
    every = completion.completions or [completion]
    return [one.logprob for c in every for one in c.logprobs or [] if one.logprob is not None]


def answers(runtime: Runtime, requests: list[Request]) -> list[Completion]:
    done = [future.result() for future in runtime.submit_many(requests)]
    runtime._thread.call(lambda engine: engine.check_integrity())
    stats = runtime.stats()
    assert (stats.slots_in_use, stats.slots_free + stats.slots_cached) == (0, stats.slots_total)
    return done


def mixed_load() -> list[Request]:
    prompts = repetitive(2 * len(KINDS))
    return [Request(prompt, SamplingParams(**KINDS[i % len(KINDS)])) for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_mixed_load_gets_the_answers_of_single_tokens(options: dict[str, Any]) -> None:
    with single(**options) as plain, drafting(**options) as drafted:
        expected, got = answers(plain, mixed_load()), answers(drafted, mixed_load())
        again = answers(drafted, mixed_load())
        stats = drafted.stats()
    assert [said(one) for one in got] == [said(one) for one in expected]
    assert [said(one) for one in again] == [said(one) for one in expected]
    for one, other in zip(got, expected, strict=True):
        assert logprobs(one) == pytest.approx(logprobs(other), abs=1e-4)
    assert stats.drafted_tokens > stats.accepted_tokens > 0


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gemma3", "phi3", "gpt2"])
def test_greedy_tokens_equal_transformers(kind: str) -> None:
    prompts = repetitive(6)
    expected = [greedy_reference(tiny_model(kind), prompt, 24) for prompt in prompts]
    with drafting(kind) as runtime:
        assert [runtime.generate(prompt, **GREEDY).token_ids for prompt in prompts] == expected
        runtime.clear_cache()
        assert [c.token_ids for c in runtime.generate(prompts, **GREEDY)] == expected
        assert runtime.stats().accepted_tokens > 0


def oracle(prompt: list[int], answer: list[int], shift: int = 0) -> LookUp:
    """Guesses that are the answer; with a `shift`, wrong in every token."""

    def look_up(text: NDArray[np.int32], namespace: str, most: int) -> tuple[int, list[int]]:
        place = len(text) - len(prompt)
        return 3, [(token + shift) % 250 for token in answer[place : place + most]]

    return look_up


def test_guesses_that_always_come_true_take_a_step_for_eight_tokens() -> None:
    prompt = random_prompt(30)
    answer = greedy_reference(tiny_model(), prompt, 33)
    with drafting(look_up=oracle(prompt, answer)) as runtime:
        assert runtime.generate(prompt, temperature=0, max_tokens=33, ignore_eos=True).token_ids == answer
        stats = runtime._thread.call(lambda engine: engine.stats())  # after the step that ended the answer
    assert stats.steps == 1 + 4  # the prompt gives the first token, four steps of 8 the others
    assert stats.drafted_tokens == stats.accepted_tokens == 4 * (MAX_NEW - 1)


def test_guesses_that_never_come_true_change_neither_answer_nor_steps() -> None:
    prompt = random_prompt(30)
    answer = greedy_reference(tiny_model(), prompt, 33)
    with drafting(look_up=oracle(prompt, answer, shift=1)) as runtime:
        assert runtime.generate(prompt, temperature=0, max_tokens=33, ignore_eos=True).token_ids == answer
        stats = runtime._thread.call(lambda engine: engine.stats())
    assert (stats.steps, stats.accepted_tokens) == (33, 0)
    assert stats.drafted_tokens > 0


def test_what_was_guessed_wrongly_is_never_taken_for_cached() -> None:
    prompt = random_prompt(30)
    answer = greedy_reference(tiny_model(), prompt, 20)
    longer = [*prompt, *answer, 9]
    with drafting(look_up=oracle(prompt, answer, shift=1)) as runtime:
        runtime.generate(prompt, temperature=0, max_tokens=20, ignore_eos=True)
        again = runtime.generate(longer, **GREEDY)
    assert again.usage.cached_tokens == len(prompt) + 19
    assert again.token_ids == greedy_reference(tiny_model(), longer, 24)


def test_a_stream_has_the_chunks_of_single_tokens() -> None:
    prompt = random_prompt(30)
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "ignore_eos": True, "logprobs": True}

    def pieces(runtime: Runtime) -> list[tuple[str, list[int]]]:
        return [(chunk.text, chunk.token_ids) for chunk in runtime.stream(prompt, **options)]

    answer = greedy_reference(tiny_model(), prompt, 24)
    with single() as plain, drafting(look_up=oracle(prompt, answer)) as drafted:
        assert pieces(drafted) == pieces(plain)


class Collected:
    """A listener that cancels its request after so many chunks."""

    def __init__(self, enough: int, cancel: Callable[[], None]) -> None:
        self.enough, self.cancel = enough, cancel
        self.ids: list[int] = []
        self.ended: list[object] = []

    def on_chunk(self, chunk: Chunk) -> None:
        self.ids += chunk.token_ids
        if len(self.ids) == self.enough:
            self.cancel()

    def on_finish(self, completion: Completion) -> None:
        self.ended.append(completion)

    def on_error(self, error: BaseException) -> None:
        self.ended.append(error)


def test_a_request_that_is_cancelled_among_its_drafts_gets_no_further_token() -> None:
    prompt = random_prompt(30)
    answer = greedy_reference(tiny_model(), prompt, 24)
    with drafting(look_up=oracle(prompt, answer)) as runtime:

        def run(engine: Any) -> Collected:
            request = Request(prompt, SamplingParams(**GREEDY), stream=True)
            listener = Collected(4, lambda: engine.cancel(submission.id))
            submission = Submission(request, listener, PromptInput(np.array(prompt, np.int32)))
            engine.add([submission])
            while not engine.idle:
                engine.step()
            engine.check_integrity()
            return listener

        listener = runtime._thread.call(run)
    assert listener.ids == answer[:4]
    assert [type(end).__name__ for end in listener.ended] == ["RequestCancelled"]


def test_a_failing_sampler_fails_the_rows_that_were_sampled_further(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, options = random_prompt(30), {**GREEDY, "logprobs": True}
    answer = greedy_reference(tiny_model(), prompt, 24)
    with drafting(look_up=oracle(prompt, answer)) as runtime:

        def prepare(engine: Any) -> None:
            whole, calls = engine.sampler.sample, []

            def sample(plan: Any, logits: Any) -> Any:
                calls.append(plan)
                if len(calls) == 4:
                    raise ValueError("broken")
                return whole(plan, logits)

            engine.sampler.sample = sample

        runtime._thread.call(prepare)
        with pytest.raises(Exception, match="broken"):
            runtime.generate(prompt, **options)
        assert runtime.generate(prompt, **options).token_ids == answer
        runtime._thread.call(lambda engine: engine.check_integrity())


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_is_guessed_the_answers_are_the_same(data: st.DataObject, pair: tuple[Runtime, Runtime]) -> None:
    plain, drafted = pair
    wrong = data.draw(st.lists(st.lists(st.integers(3, 200), max_size=MAX_NEW), min_size=1, max_size=4))
    kinds = data.draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=5))
    right = data.draw(st.integers(0, MAX_NEW))
    requests = [Request(prompt, SamplingParams(**kind)) for prompt, kind in zip(repetitive(5), kinds, strict=False)]
    expected = answers(plain, requests)
    known = [request.prompt + one.token_ids for request, one in zip(requests, expected, strict=True)]

    def look_up(text: NDArray[np.int32], namespace: str, most: int) -> tuple[int, list[int]]:
        """Right for a while, then anything."""
        so_far = text.tolist()
        true = next((ids[len(so_far) :] for ids in known if ids[: len(so_far)] == so_far), [])
        return 2, (true[:right] + wrong[len(so_far) % len(wrong)])[:most]

    def use(engine: Any) -> None:
        engine.drafter.look_up = look_up

    drafted._thread.call(use)
    assert [said(one) for one in answers(drafted, requests)] == [said(one) for one in expected]


@pytest.fixture(scope="module")
def pair() -> Any:
    with single(cache=CacheConfig(max_tokens=700)) as plain, drafting(cache=CacheConfig(max_tokens=700)) as drafted:
        yield plain, drafted


# -- what is guessed, and when ----------------------------------------------------------------------------------


def rows(*prompts: list[int], max_new_tokens: int = 50) -> list[ScheduledRow]:
    """Sequences whose last token is to be run, with room for more."""
    made = []
    for prompt in prompts:
        sequence = sequence_of(prompt)
        sequence.bounds, sequence.progress.num_computed = Bounds(max_new_tokens), len(prompt) - 1
        sequence.kv.num_shared = len(prompt) + 40
        made.append(ScheduledRow(sequence, 1, 1))
    return made


def drafter(seconds: Callable[[int], float] = lambda n: 0.01, eos: tuple[int, ...] = (257,)) -> Drafter:
    made = Drafter(eos, 2048, StepPrices())
    for _ in range(40):
        for num_tokens in (1, 2, 4, 8, 16):
            made.prices.forwards.add(num_tokens, seconds(num_tokens))
    return made


def test_a_text_goes_on_as_it_went_on_before() -> None:
    (row,) = drafter().extend(rows([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 50, 2, 3]))
    assert row.drafts == (4, 5, 6, 7, 8, 9, 10)
    assert (row.num_new, row.num_logits) == (8, 8)


def test_what_repeats_itself_is_guessed_to_go_on_repeating_itself() -> None:
    assert drafter().extend(rows([9, 5, 6, 5, 6]))[0].drafts == (5, 6, 5, 6, 5, 6, 5)


def test_what_was_written_lately_is_guessed_within_its_namespace() -> None:
    made = drafter()
    (written,) = rows([10, 11, 12, 13])
    written.sequence.tokens.extend([20, 21, 22, 23])
    made.remember(written.sequence)
    assert made.extend(rows([90, 12, 13]))[0].drafts == (20, 21, 22, 23)
    (other,) = rows([90, 12, 13])
    other.sequence.request.namespace = "another"
    assert made.extend([other])[0].drafts == ()
    made.forget()
    assert made.extend(rows([90, 12, 13]))[0].drafts == ()


def test_a_guess_ends_before_the_end_of_a_text() -> None:
    assert drafter(eos=(7,)).extend(rows([1, 2, 3, 4, 7, 8, 9, 1, 2]))[0].drafts == (3, 4)


def test_no_more_is_guessed_than_may_be_written_nor_than_there_are_slots_for() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2]
    assert drafter().extend(rows(text, max_new_tokens=3))[0].drafts == (3, 4)
    assert drafter().extend(rows(text, max_new_tokens=1))[0].drafts == ()
    (full,) = rows(text)
    full.sequence.kv.num_shared = len(text) + 1
    assert drafter().extend([full])[0].drafts == (3,)


def test_where_a_token_takes_as_long_as_a_step_nothing_is_drafted() -> None:
    assert drafter(lambda n: 0.01 * n).extend(rows([1, 2, 3, 4, 5, 1, 2]))[0].drafts == ()


def test_the_dearer_a_token_the_fewer_are_drafted() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1, 2, 3]
    counts = [
        len(drafter(lambda n, s=share: 0.01 * (1 + s * n)).extend(rows(text))[0].drafts)
        for share in (0.0, 0.05, 0.2, 0.5, 2.0)
    ]
    assert counts[0] == 7 and counts[-1] == 0
    assert counts == sorted(counts, reverse=True)


def test_a_step_of_many_rows_that_is_bound_by_computing_carries_no_drafts() -> None:
    text = [1, 2, 3, 4, 5, 1, 2]
    made = drafter(lambda n: 0.005 + 0.001 * n)
    assert made.extend(rows(text))[0].drafts
    many = rows(*[text] * 60)
    assert made.extend(many) == many


def test_beside_a_prompt_nothing_is_drafted() -> None:
    decoded, prompt = rows([1, 2, 3, 4, 5, 1, 2], random_prompt(100))
    prompt = prompt._replace(num_new=99)
    assert drafter().extend([decoded, prompt]) == [decoded, prompt]


def test_a_sequence_whose_guesses_fail_is_left_alone_and_one_that_begins_to_copy_is_noticed() -> None:
    made = drafter(lambda n: 0.010 + 0.002 * n)
    (row,) = rows([*range(3, 60), *range(3, 60)])
    sequence = row.sequence

    def drafted_when(write: Callable[[tuple[int, ...]], int], steps: int) -> list[int]:
        counts = []
        for _ in range(steps):
            (extended,) = made.extend([ScheduledRow(sequence, 1, 1)])
            counts.append(len(extended.drafts))
            sequence.tokens.append(write(extended.drafts))
            sequence.progress.num_computed += 1
            sequence.kv.num_shared += 1
            sequence.bounds = Bounds(sequence.bounds.max_new_tokens + 1)
        return counts

    dice = random.Random(0)
    failing = drafted_when(lambda drafts: dice.randrange(70, 90), 60)
    assert failing[0] > 0
    assert sum(failing[-20:]) <= 10
    draft_state = drafted_when(lambda drafts: 3 + (sequence.tokens[-1] - 2) % 57, 80)
    assert min(draft_state[-20:]) > 0


def test_steps_at_once_are_left_for_drafts_that_give_more_tokens_a_second() -> None:
    made, text = drafter(), [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2]
    made.prices = Priced(alone_s=0.012, at_once_s=0.010)
    assert len(made.extend(rows(text), 16)[0].drafts) == 7
    made.prices = Priced(alone_s=0.012, at_once_s=0.0061)  # 2.08 tokens are promised: 173 a second, against 164
    assert made.extend(rows(text), 16)[0].drafts == ()
    made.prices = Priced(alone_s=0.012, at_once_s=0.001)
    assert made.extend(rows(text), 16)[0].drafts == ()
    assert len(made.extend(rows(text), 1)[0].drafts) == 7  # a row that needs the host is run by itself anyway


class Priced(StepPrices):
    """A price for each step, whatever its tokens."""

    known = True
    per_token = 0.0

    def __init__(self, alone_s: float, at_once_s: float) -> None:
        super().__init__()
        self.alone_s, self.at_once_s = alone_s, at_once_s

    def alone(self, num_tokens: float) -> float:
        return self.alone_s

    def at_once(self, num_tokens: float, num_steps: int) -> float:
        return self.at_once_s


def test_the_longer_nothing_was_drafted_the_more_steps_go_by_before_the_next_guess() -> None:
    made = drafter()
    (row,) = rows(random_prompt(9), max_new_tokens=500)
    sequence, patience = row.sequence, []
    for _ in range(6):
        made.extend([row], 16)
        patience.append(made.patience)
        sequence.tokens.extend(1000 + len(sequence.tokens) + i for i in range(made.patience))
        sequence.progress.num_computed, sequence.kv.num_shared = sequence.num_tokens - 1, sequence.num_tokens + 40
    assert patience == [2, 4, 8, 16, 16, 16]


def test_one_of_many_rows_that_was_due_for_a_guess_used_to_end_the_steps_of_all_at_once() -> None:
    made, scheduled = drafter(), rows(*(random_prompt(9, seed=i) for i in range(8)), max_new_tokens=500)
    made.prices = Priced(alone_s=0.012, at_once_s=0.001)
    patience = []
    for _ in range(4):
        made.extend(scheduled, 16)
        patience.append(made.patience)
        for row in scheduled:
            row.sequence.tokens.extend(1000 + row.sequence.num_tokens + i for i in range(made.patience))
        scheduled[0].sequence.draft = None  # its draft came true: it is looked up after every step
    assert min(patience) >= 4


def test_the_chance_of_a_guess_is_its_share_of_the_last_ones() -> None:
    odds = AcceptanceRate(memory=16)
    assert odds.chance(2, otherwise=0.4, weight=8) == pytest.approx(0.4)
    for _ in range(100):
        odds.add(2, True)
    assert odds.chance(2, otherwise=0.4, weight=1) > 0.9
    for _ in range(30):
        odds.add(2, False)
    assert odds.chance(2, otherwise=0.4, weight=1) < 0.3
    assert odds.chance(3, otherwise=0.4, weight=1) == pytest.approx(0.4)


def test_switched_off_nothing_is_drafted() -> None:
    with single() as runtime:
        runtime.generate([1, 2, 3] * 10, **GREEDY)
        stats = runtime.stats()
    assert (stats.drafted_tokens, stats.accepted_tokens, stats.steps) == (0, 0, 24)


def test_where_steps_run_ahead_and_in_the_serial_lane_nothing_is_drafted() -> None:
    def drafts(runtime: Runtime) -> Stats:
        with runtime:
            runtime.generate([1, 2, 3] * 10, **GREEDY)
            return runtime.stats()

    assert drafts(Runtime(tiny_model(), tokenizer=byte_tokenizer(), overlap=True)).drafted_tokens == 0
    with pytest.warns(UserWarning, match="serial lane"):
        assert drafts(Runtime(tiny_model("mamba"), tokenizer=byte_tokenizer())).drafted_tokens == 0


def test_an_unknown_speculation_is_refused() -> None:
    with pytest.raises(ConfigError, match="speculation is 'on'; use 'auto' or 'off'"):
        EngineConfig(speculation="on")  # type: ignore[arg-type]
