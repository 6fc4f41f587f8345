"""GraftLM's own programs on llama-cpp-python, where that is installed: the same answers in float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is in no extra but bench-cpu: it compiles for minutes")
pytest.importorskip("gguf")

import graftlm as gl
from bench.cpu._models import write_gguf
from bench.workloads import _world
from tests.models import byte_tokenizer, tiny_model

PROMPTS = ["The same beginning, and this", "The same beginning, and that", "Another"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    write_gguf(folder, "float32")
    return str(folder)


@pytest.fixture(scope="module")
def theirs(folder: str) -> Iterator[gl.Runtime]:
    assert _world.count(2) == 2  # its import offers the engine
    with gl.Runtime(folder, engine="llama-cpp") as runtime:
        yield runtime


@pytest.fixture(scope="module")
def ours(folder: str) -> Iterator[gl.Runtime]:
    with gl.Runtime(folder) as runtime:
        yield runtime


def test_greedy_answers_are_equal_and_the_last_prompt_is_gone_on_with(ours: gl.Runtime, theirs: gl.Runtime) -> None:
    theirs.reset_stats()
    theirs.clear_cache()
    options = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    assert [a.token_ids for a in theirs.generate(PROMPTS, **options)] == [
        a.token_ids for a in ours.generate(PROMPTS, **options)
    ]
    stats = theirs.stats()
    assert (stats.requests, stats.prompt_tokens) == (3, sum(map(len, PROMPTS)))
    assert stats.computed_tokens == stats.prompt_tokens - len("The same beginning, and th")


def test_constraints_and_stop_strings_are_kept(ours: gl.Runtime, theirs: gl.Runtime) -> None:
    for options in ({"regex": "[a-c]{4}x?"}, {"stop": ["e"], "ignore_eos": True}):
        a, b = (r.generate(PROMPTS[0], max_tokens=12, temperature=0, **options) for r in (ours, theirs))
        assert (a.text, a.finish_reason) == (b.text, b.finish_reason)


def test_scores_are_equal(ours: gl.Runtime, theirs: gl.Runtime) -> None:
    ids, asked = [10, 20, 30], [40, 50]
    assert theirs.score(ids, asked).logprobs == pytest.approx(ours.score(ids, asked).logprobs, abs=1e-3)
