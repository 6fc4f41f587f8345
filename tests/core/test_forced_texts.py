"""Requests whose whole text is forced, so that no step of the model is made for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from graftlm.core.config import CacheConfig, SamplingParams
from graftlm.core.request import Request
from graftlm.core.runtime import Runtime
from tests.models import byte_tokenizer, tiny_model

FORCED: list[tuple[dict[str, Any], str, str]] = [
    ({"choices": ["only"]}, "only", "stop"),
    ({"regex": "abc"}, "abc", "stop"),
    ({"json_schema": {"const": [1, "a"]}}, '[1,"a"]', "stop"),
    ({"regex": "abc[de]", "stop": "b"}, "a", "stop"),
    ({"regex": "abc[de]", "stop": "a"}, "", "stop"),
    ({"regex": "abcdef", "max_tokens": 2}, "ab", "length"),
]


@pytest.fixture(scope="module")
def rt() -> Iterator[Runtime]:
    with Runtime(tiny_model("llama"), tokenizer=byte_tokenizer(), cache=CacheConfig(max_tokens=2048)) as made:
        yield made


@pytest.mark.parametrize(("constraint", "text", "reason"), FORCED)
def test_it_is_streamed_with_its_end(rt: Runtime, constraint: dict[str, Any], text: str, reason: str) -> None:
    (chunk,) = rt.stream("x", **constraint)
    assert (chunk.text, chunk.finish_reason) == (text, reason)
    assert chunk.usage is not None and chunk.usage.completion_tokens == len(chunk.token_ids)


@pytest.mark.parametrize(("constraint", "text", "reason"), FORCED)
def test_several_answers_all_end(rt: Runtime, constraint: dict[str, Any], text: str, reason: str) -> None:
    future = rt.submit(Request("x", SamplingParams(**constraint, n=3)))
    done = future.result(timeout=120)
    assert [(c.text, c.finish_reason, c.stop) for c in done.completions] == [(text, reason, constraint.get("stop"))] * 3
    assert done.usage.completion_tokens == 3 * len(done.completions[0].token_ids)
    rt._thread.call(lambda engine: engine.check_integrity())


def test_several_streamed_answers_all_end(rt: Runtime) -> None:
    chunks = list(rt.stream("x", choices=["only"], n=3))
    assert [(chunk.index, chunk.text, chunk.finish_reason) for chunk in chunks] == [
        (i, "only", "stop") for i in range(3)
    ]
