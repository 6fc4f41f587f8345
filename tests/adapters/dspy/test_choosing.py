"""Literal, bool and enum fields: the likeliest option as a whole, in one request."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Literal

import dspy
import pytest

from graftlm.adapters.dspy import GraftAdapter, GraftLM
from graftlm.adapters.dspy.choosing import Choosing
from graftlm.adapters.dspy.pieces import joined, literal
from graftlm.core.config import CacheConfig, SamplingParams, SchedulerConfig
from graftlm.core.constraint import vocabulary_of
from graftlm.core.grammar.cache import compile_cached
from graftlm.core.grammar.nodes import nodes
from graftlm.core.grammar.schema.lowering import Lowered
from graftlm.core.request import Completion, Request
from graftlm.core.runtime import Runtime
from tests.models import byte_tokenizer, random_prompt, tiny_model

HEADER = "[[ ## label ## ]]\n"
OPTIONS = ("bug", "bugfix", "feature", "question about the price", "q", "no", "other")


def model() -> Any:
    return tiny_model("llama", max_position_embeddings=4096)


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with Runtime(model(), tokenizer=byte_tokenizer(merges=[("b", "u"), ("n", "o")]), max_batch=6) as one:
        yield one


def grammar(runtime: Runtime, options: Sequence[str] = OPTIONS, *, before: str = "") -> Any:
    labels = Lowered(nodes.alternation(*map(nodes.literal, options)), {})
    (whole,) = joined([literal(before + HEADER), labels, literal("\n\n[[ ## completed ## ]]\n")])
    return compile_cached(whole, vocabulary_of(runtime.tokenizer))


def submit(
    runtime: Runtime, prompt: list[int], options: Sequence[str] = OPTIONS, **sampling: Any
) -> Future[Completion]:
    constraint = Choosing(grammar(runtime, options), {HEADER: options}, vocabulary_of(runtime.tokenizer))
    settings = {"temperature": 0.0, "max_tokens": 120} | sampling
    return runtime.submit(Request(prompt, SamplingParams.from_options(constraint=constraint, **settings)))


def chosen(completion: Completion) -> str:
    return completion.text.removeprefix(HEADER).partition("\n\n")[0]


def likelihoods(runtime: Runtime, prompt: list[int]) -> dict[str, float]:
    """Of each option and the end behind it, measured by itself."""
    base = prompt + runtime.tokenizer.encode_continuation(HEADER)
    return {option: math.fsum(runtime.score(base, option + "\n\n").logprobs) for option in OPTIONS}


def test_the_option_is_the_likeliest_as_a_whole_where_tokens_one_by_one_are_not(runtime: Runtime) -> None:
    differ = 0
    for seed in range(12):
        prompt = random_prompt(40, seed)
        measured = likelihoods(runtime, prompt)
        answer = chosen(submit(runtime, prompt).result())
        assert answer == max(OPTIONS, key=measured.__getitem__)
        walked = SamplingParams.from_options(constraint=grammar(runtime), temperature=0.0, max_tokens=120)
        differ += answer != chosen(runtime.submit(Request(prompt, walked)).result())
    assert differ > 0


def test_a_choice_is_part_of_its_request(runtime: Runtime) -> None:
    runtime.reset_stats()
    done = submit(runtime, random_prompt(64, 1), logprobs=True).result()
    assert runtime.stats().requests == 1
    assert done.text.endswith("## completed ## ]]\n") and done.finish_reason == "stop"
    assert [token for token in done.logprobs or [] if token.logprob is not None]
    assert runtime.stats().prompt_tokens == 64


def test_more_requests_than_rows_all_choose_what_they_choose_alone(runtime: Runtime) -> None:
    prompts = [random_prompt(50 + i, i) for i in range(24)]
    alone = [submit(runtime, prompt).result().text for prompt in prompts]
    runtime.clear_cache()
    assert [future.result().text for future in [submit(runtime, prompt) for prompt in prompts]] == alone
    assert runtime.stats().slots_in_use == 0


def test_a_warm_choice_is_drawn_by_likelihood_and_repeats_with_its_seed(runtime: Runtime) -> None:
    prompt = random_prompt(40, 3)
    measured = likelihoods(runtime, prompt)

    def draw(seed: int, temperature: float) -> str:
        return chosen(submit(runtime, prompt, temperature=temperature, seed=seed).result())

    drawn = [draw(seed, 8.0) for seed in range(40)]
    assert drawn == [draw(seed, 8.0) for seed in range(40)] and len(set(drawn)) > 2
    best = max(OPTIONS, key=measured.__getitem__)
    assert {draw(seed, 0.01) for seed in range(5)} == {best}


def test_n_answers_and_a_tight_budget_are_written_token_by_token(runtime: Runtime) -> None:
    done = submit(runtime, random_prompt(30, 5), n=3, temperature=1.0).result()
    assert all(chosen(one) in OPTIONS for one in done.completions) and len(done.completions) == 3
    short = submit(runtime, random_prompt(30, 6), max_tokens=45, close_on_length=True).result()
    assert chosen(short) in OPTIONS


def test_a_cancelled_choice_gives_everything_back(runtime: Runtime) -> None:
    futures = [submit(runtime, random_prompt(300, 50 + i)) for i in range(12)]
    for future in futures[::2]:
        future.cancel()
    assert all(chosen(future.result()) in OPTIONS for future in futures[1::2])
    runtime._thread.call(lambda engine: engine.check_integrity())
    while not runtime._thread.call(lambda engine: engine.idle):
        pass
    assert runtime.stats().slots_in_use == 0


def test_a_choice_without_a_prefix_cache_is_the_same(runtime: Runtime) -> None:
    prompts = [random_prompt(40, seed) for seed in range(3)]
    expected = [submit(runtime, prompt).result().text for prompt in prompts]
    schedule = SchedulerConfig(policy="fcfs")
    tokenizer = runtime.tokenizer.hf
    with Runtime(model(), tokenizer=tokenizer, schedule=schedule, cache=CacheConfig(enabled=False)) as bare:
        assert [submit(bare, prompt).result().text for prompt in prompts] == expected


class Sort(dspy.Signature):
    """Sort the ticket."""

    ticket: str = dspy.InputField()
    label: Literal["bug", "bugfix", "a question about the price"] = dspy.OutputField()
    urgent: bool = dspy.OutputField()
    summary: str = dspy.OutputField()
    kind: Literal["x", "y"] = dspy.OutputField()


def test_a_signature_with_choices_is_one_request_and_streams_the_same(runtime: Runtime) -> None:
    lm = GraftLM(runtime=runtime, cache=False, temperature=0.0, max_tokens=400)
    runtime.reset_stats()
    with dspy.context(lm=lm, adapter=GraftAdapter(use_json_adapter_fallback=False)):
        made = dspy.Predict(Sort)(ticket="it fails")
        assert runtime.stats().requests == 1
        events = list(dspy.streamify(dspy.Predict(Sort), async_streaming=False)(ticket="it fails"))
    assert made.label in Sort.model_fields["label"].annotation.__args__ and made.kind in ("x", "y")
    assert dict(events[-1]) == dict(made)
