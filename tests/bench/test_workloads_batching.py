"""GraftLM's own programs on transformers' continuous batching: the same answers in float32."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import graftlm as gl
from bench.workloads import _world
from graftlm.ab.engines.frameworks import named_engines
from graftlm.ab.measure.meter import Meter
from tests.models import byte_tokenizer, tiny_model

PROMPTS = ["The same beginning, and this", "The same beginning, and that", "Another"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def batching(folder: str) -> Iterator[gl.Runtime]:
    assert _world.count(2) == 2  # its import offers the engine
    with named_engines("native", 16)["hf-batching"](folder) as runtime:
        yield runtime


def test_continuous_batching_gives_the_same_answers(batching: gl.Runtime, folder: str) -> None:
    options = {"max_tokens": 6, "temperature": 0}
    answers = batching.generate(PROMPTS, **options)
    with gl.Runtime(folder) as ours:
        assert [a.token_ids for a in answers] == [a.token_ids for a in ours.generate(PROMPTS, **options)]
    assert batching.stats().largest_batch > 1
    with pytest.raises(gl.EngineError, match="has no constraints; use hf"):
        batching.generate("A", regex="[ab]", temperature=0)


def test_what_continuous_batching_finds_in_its_cache_is_counted_and_forgotten_between_rounds(
    batching: gl.Runtime,
) -> None:
    computed = []
    for _ in range(3):
        batching.reset_stats()
        batching.generate("a page of 256 tokens " * 15, max_tokens=2, temperature=0)
        computed.append(batching.stats().computed_tokens)
        if len(computed) == 2:
            batching.clear_cache()
    assert computed == [315, 315 - 256, 315]


def test_a_prefix_that_is_not_kept_takes_no_call_away(batching: gl.Runtime) -> None:
    """Programs of a batch ask for their common prefix first: 24 calls used to be counted as 23."""
    meter = Meter()
    meter.attach()
    meter.start()
    with batching.warm("The same beginning"):
        batching.generate(PROMPTS, max_tokens=3, temperature=0)
    assert (meter.work().calls, meter.work().prompt_tokens) == (3, sum(map(len, PROMPTS)))
