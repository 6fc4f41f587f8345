"""Two ranks on this machine's CPU: the answers of one process, and an end that every request hears of."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import graftlm as gl
from graftlm.kernels.jit import python_process
from tests.models import byte_tokenizer, greedy_reference, random_prompt, tiny_model

LENGTH = 12
GREEDY: dict[str, Any] = {"max_tokens": LENGTH, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[gl.Runtime]:
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    with gl.Runtime(folder, device="cpu", strict=True, tensor_parallel=2, max_step_tokens=64, quiet=True) as made:
        yield made


def crew_of(runtime: gl.Runtime) -> Any:
    runtime.load()
    return runtime._thread.engine.runner.crew  # type: ignore[union-attr]


def test_tokens_are_those_of_one_process(runtime: gl.Runtime) -> None:
    """Alone, in a batch, from the cache, and in chunks: the last prompt is longer than a step."""
    model = tiny_model("llama")
    prompts = [random_prompt(length, seed) for seed, length in enumerate((5, 40, 200))]
    prompts.append([*prompts[1], *random_prompt(9, 7)])
    expected = [greedy_reference(model, prompt, LENGTH) for prompt in prompts]
    alone = [runtime.generate(prompt, **GREEDY) for prompt in prompts]
    assert [answer.token_ids for answer in alone] == expected
    assert alone[3].usage.cached_tokens >= len(prompts[1])
    assert [answer.token_ids for answer in runtime.generate(prompts, **GREEDY)] == expected
    runtime.clear_cache()
    assert [answer.token_ids for answer in runtime.generate(prompts, **GREEDY)] == expected
    layout = runtime._thread.engine.runner.own.loaded.layers[0]  # type: ignore[union-attr]
    assert (layout.num_heads, layout.num_kv_heads) == (2, 1)


def test_constraints_and_forks_stay_on_rank_0(runtime: gl.Runtime) -> None:
    answer = runtime.generate("Mara", regex="[a-f]{4,6}", temperature=0)
    assert 4 <= len(answer.text) <= 6 and set(answer.text) <= set("abcdef")
    drawn = runtime.generate("Mara", n=3, max_tokens=6, seed=5, temperature=1.0)
    again = runtime.generate("Mara", n=3, max_tokens=6, seed=5, temperature=1.0)
    assert [a.token_ids for a in drawn.completions] == [a.token_ids for a in again.completions]


def test_the_death_of_a_rank_ends_every_request_with_its_name(runtime: gl.Runtime) -> None:
    """Last: the runtime is over afterwards."""
    crew = crew_of(runtime)
    (follower,) = crew.followers
    many = gl.SamplingParams(max_tokens=1000, temperature=0, ignore_eos=True)
    futures = runtime.submit_many([gl.Request(random_prompt(9, seed), many) for seed in range(3)])
    while not runtime.stats().completion_tokens:
        time.sleep(0.01)
    os.kill(follower.process.pid, signal.SIGKILL)
    for future in futures:
        with pytest.raises(gl.EngineError, match=rf"rank 1 \(process {follower.process.pid}\) was ended by signal 9"):
            future.result(60)
    with pytest.raises(gl.EngineError, match="rank 1"):
        runtime.generate("again")
    runtime.close()
    assert follower.process.returncode == -signal.SIGKILL


def test_a_follower_ends_with_its_rank_0() -> None:
    process = python_process.start(
        ("-m", "graftlm.core.tensor_parallel.follower"), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    process.communicate(b"", timeout=600)
    assert process.returncode == 0


def test_a_rank_keeps_no_file() -> None:
    assert not [path for path in Path("/dev/shm").glob("graftlm*")]
