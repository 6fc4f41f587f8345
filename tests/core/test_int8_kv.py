"""A runtime whose KV cache is in int8: answers, reuse, eviction, branches, and who is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import graftlm as gl
from graftlm.core.config import CacheConfig, EngineConfig
from graftlm.core.errors import ConfigError
from graftlm.core.kv.kv_format import kv_format
from graftlm.core.model.load import load_model
from tests.models import byte_tokenizer, tiny_model

INT8 = CacheConfig(dtype="int8")
TEXTS = [
    f"Mara is a baker. She is {20 + i} years old and lives in Oslo. Question: where does Mara live? Answer:"
    for i in range(6)
]


@pytest.fixture(scope="module")
def runtime() -> Iterator[gl.Runtime]:
    with gl.Runtime("sprout", device="cpu", dtype="float32", cache=INT8, quiet=True) as made:
        yield made


def answers(runtime: gl.Runtime, texts: list[str], num: int = 24) -> list[list[int]]:
    return [list(one.token_ids) for one in runtime.generate(texts, max_tokens=num, temperature=0, ignore_eos=True)]


def test_the_embedded_model_answers_nearly_the_same(runtime: gl.Runtime) -> None:
    with gl.Runtime("sprout", device="cpu", dtype="float32", quiet=True) as plain:
        exact = answers(plain, TEXTS)
        scores = [plain.score(TEXTS[0], " Oslo").logprobs, runtime.score(TEXTS[0], " Oslo").logprobs]
    rounded = answers(runtime, TEXTS)
    assert runtime.stats().kv == "int8"
    assert sum(a[:4] == b[:4] for a, b in zip(exact, rounded, strict=True)) >= 5
    assert sum(x == y for a, b in zip(exact, rounded, strict=True) for x, y in zip(a, b, strict=True)) >= 0.8 * 6 * 24
    assert torch.tensor(scores[0]).sub(torch.tensor(scores[1])).abs().max() < 0.1


def test_reused_prefixes_do_not_change_answers(runtime: gl.Runtime) -> None:
    runtime.clear_cache()
    first = answers(runtime, TEXTS)
    runtime.reset_stats()
    again = answers(runtime, TEXTS)
    assert runtime.stats().cached_tokens > 0
    assert again == first
    runtime.clear_cache()
    assert [answers(runtime, [text])[0] for text in TEXTS] == first


def test_a_small_pool_evicts_and_answers_the_same(runtime: gl.Runtime) -> None:
    small = CacheConfig(dtype="int8", max_tokens=150)
    with gl.Runtime("sprout", device="cpu", dtype="float32", cache=small, quiet=True) as other:
        assert answers(other, TEXTS) == answers(runtime, TEXTS)
        assert answers(other, TEXTS) == answers(runtime, TEXTS)


def test_branches_read_what_their_parent_computed(runtime: gl.Runtime) -> None:
    @gl.program
    def ask(s: gl.Branch) -> None:
        s += TEXTS[0]
        branches = s.fork(3)
        for i, branch in enumerate(branches):
            branch += f" {i}"
            branch += gl.gen("text", max_tokens=8, temperature=0)
        s += "".join(str(branch["text"]) for branch in branches)

    runtime.clear_cache()
    runtime.reset_stats()
    assert ask.run(runtime=runtime).error is None
    assert runtime.stats().cached_tokens > 0


def test_twice_as_many_tokens_fit_as_in_bfloat16() -> None:
    loaded = load_model(tiny_model(head_dim=64), EngineConfig(device="cpu", dtype="bfloat16"), byte_tokenizer())
    sizes = [kv_format(loaded, EngineConfig(cache=cache)).bytes_per_token(loaded) for cache in (CacheConfig(), INT8)]
    assert sizes[0] / sizes[1] > 1.88


@pytest.mark.parametrize(
    ("changes", "options", "reason"),
    [
        ({"lane": "serial"}, {}, "runs in the serial lane"),
        ({"device": torch.device("cuda", 0)}, {}, "runs on cuda:0"),
        ({"dtype": torch.float16}, {}, "computes in float16"),
        ({}, {"strict": True}, "strict=True"),
        ({}, {"attention": "triton"}, "attention='triton'"),
    ],
    ids=str,
)
def test_int8_is_refused_where_it_cannot_be(
    changes: dict[str, object], options: dict[str, object], reason: str
) -> None:
    loaded = load_model(tiny_model(), EngineConfig(device="cpu"), byte_tokenizer())
    with pytest.raises(ConfigError, match=f"CacheConfig.dtype is 'int8', but .*{reason}; .* leave it out"):
        kv_format(replace(loaded, **changes), EngineConfig(cache=INT8, **options))  # type: ignore[arg-type]
