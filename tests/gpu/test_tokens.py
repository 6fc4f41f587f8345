"""Greedy float32 tokens on a GPU are those of transformers on a CPU; tests/core/test_runtime.py asks a CPU the same."""

from __future__ import annotations

import pytest

from graftlm.core.config import CacheConfig
from tests.gpu.device import GREEDY, NEW, SHAPES, family, on_gpu
from tests.models import greedy_reference, random_prompt, tiny_model

pytestmark = pytest.mark.gpu


@pytest.mark.filterwarnings("ignore:strict=True does not hold for GPT2")  # in the last bits of float32
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_step_tokens": 16},
        {"cache": CacheConfig(max_tokens=160), "max_batch": 4},
        {"cache": CacheConfig(max_tokens=2048, enabled=False)},
        {"strict": True},
        {"attention": "torch"},
    ],
    ids=["plain", "chunked", "evicting", "no cache", "strict", "torch's attention"],
)
def test_greedy_tokens_equal_transformers(kind: str, options: dict[str, object]) -> None:
    prompts = family(7) + [random_prompt(23, seed=5)]
    with on_gpu(kind, **options) as runtime:
        alone = runtime.generate(prompts[0], **GREEDY)
        batch = runtime.generate(prompts, **GREEDY)
        again = runtime.generate(prompts, **GREEDY)
        runtime._thread.call(lambda engine: engine.check_integrity())
    expected = [greedy_reference(tiny_model(kind), prompt, NEW) for prompt in prompts]
    assert alone.token_ids == expected[0]
    assert [c.token_ids for c in batch] == expected
    assert [c.token_ids for c in again] == expected


def test_a_prefix_that_a_full_batch_shares_gives_the_tokens_of_each_alone() -> None:
    prompts = family(32, shared=300)
    with on_gpu(max_batch=32, cache=CacheConfig(max_tokens=4096)) as runtime:
        batch = runtime.generate(prompts, **GREEDY)
        stats = runtime.stats()
    assert [c.token_ids for c in batch] == [greedy_reference(tiny_model(), prompt, NEW) for prompt in prompts]
    assert stats.largest_batch == 32
    assert stats.shared_prefix_steps > 0


def test_more_requests_than_the_pool_holds_all_get_their_tokens() -> None:
    prompts = [random_prompt(60, seed=i) for i in range(20)]
    with on_gpu(cache=CacheConfig(max_tokens=320)) as runtime:
        answers = runtime.generate(prompts, temperature=0, max_tokens=24, ignore_eos=True)
    assert [c.token_ids for c in answers] == [greedy_reference(tiny_model(), prompt, 24) for prompt in prompts]


def test_a_seeded_answer_does_not_depend_on_the_batch() -> None:
    options = {"temperature": 1.0, "top_p": 0.9, "top_k": 40, "seed": 11, "max_tokens": 10, "ignore_eos": True}
    prompts = family(7)
    with on_gpu() as runtime:
        alone = runtime.generate(prompts[4], **options)
        assert runtime.generate(prompts, **options)[4].token_ids == alone.token_ids
        other = runtime.generate(prompts[4], **options | {"seed": 12})
    assert other.token_ids != alone.token_ids


def test_the_likeliest_of_one_is_the_greedy_token() -> None:
    prompts = family(5)
    with on_gpu() as runtime:
        greedy = runtime.generate(prompts, **GREEDY)
        drawn = runtime.generate(prompts, **GREEDY | {"temperature": 1.0, "top_k": 1})
    assert [c.token_ids for c in drawn] == [c.token_ids for c in greedy]


def test_logprobs_are_those_of_the_model() -> None:
    import torch

    prompt = random_prompt(20)
    with on_gpu() as runtime:
        done = runtime.generate(prompt, **GREEDY, logprobs=True)
    reference = tiny_model()(torch.tensor([prompt + done.token_ids])).logits[0].log_softmax(-1)
    expected = [float(reference[19 + i, token].detach()) for i, token in enumerate(done.token_ids)]
    assert [entry.logprob for entry in done.logprobs or []] == pytest.approx(expected, abs=1e-3)
