"""States after failed steps, cancellation, retraction and forced tokens: answers stay those of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from graftlm import CacheConfig, Runtime
from graftlm.core.config import SamplingParams
from graftlm.core.request import Request
from graftlm.core.state_layers.gated_delta_net import GatedDeltaNet
from tests.faults import failing
from tests.models import byte_tokenizer, greedy_reference, random_prompt, tiny_model

MODEL = tiny_model("qwen3_next")
GREEDY = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
PROMPTS = [random_prompt(70, seed=1) + random_prompt(20, seed=seed) for seed in range(4)]
EXPECTED = [greedy_reference(MODEL, prompt, 10) for prompt in PROMPTS]


@pytest.fixture(params=[False, True], ids=["sync", "overlap"])
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"tokenizer": byte_tokenizer(), "device": "cpu", "dtype": "float32", "overlap": request.param}


@pytest.fixture
def runtime(options: dict[str, Any]) -> Iterator[Runtime]:
    with Runtime(MODEL, **options) as made:
        yield made.load()


def check(runtime: Runtime) -> None:
    """Answers are right, nothing is in use, and every state is that of its node's last token."""
    futures = runtime.submit_many([Request(prompt, GREEDY) for prompt in PROMPTS])
    assert [future.result(60).token_ids for future in futures] == EXPECTED
    runtime._thread.call(lambda engine: engine.check_integrity())
    stats = runtime.stats()
    assert stats.states_free + stats.states_cached == stats.states_total


@pytest.mark.parametrize("call", [3, 5, 9])
def test_a_step_that_failed_half_way_leaves_no_state_behind(runtime: Runtime, call: int) -> None:
    with failing(GatedDeltaNet, "forward", every=call, once=True) as failed:
        check(runtime)
    assert failed == [call]
    check(runtime)


def test_a_cancelled_request_gives_its_state_back(runtime: Runtime) -> None:
    for prompt in PROMPTS[:2]:
        stream = runtime.stream(prompt, max_tokens=200, temperature=0, ignore_eos=True)
        next(iter(stream))
        stream.close()
    check(runtime)


def test_retracted_sequences_go_on_from_their_states(options: dict[str, Any]) -> None:
    with Runtime(MODEL, cache=CacheConfig(max_tokens=230, states=4), **options) as runtime:
        check(runtime)
        check(runtime)


def test_forced_tokens_after_a_sampled_one_are_those_of_another_batch(runtime: Runtime) -> None:
    constraint = {"regex": r"(yes|no), because the answer is [0-9]{3}\."}
    texts = {runtime.generate(PROMPTS[i], temperature=0, max_tokens=60, **constraint).text for i in (0, 0, 0)}
    batch = runtime.generate([PROMPTS[0]] * 3, temperature=0, max_tokens=60, **constraint)
    assert len(texts | {one.text for one in batch}) == 1
    check(runtime)
