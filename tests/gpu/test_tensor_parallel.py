"""One model over two GPUs: greedy float32 tokens are those of one, and the death of a rank ends every request."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import graftlm as gl
from tests.models import byte_tokenizer, random_prompt, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="it needs two GPUs"),
]
GREEDY: dict[str, Any] = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
CACHE = gl.CacheConfig(max_tokens=20_000)


@pytest.mark.parametrize("kind", ["llama", "mixtral", "qwen3_next", "gpt_oss", "deepseek_v3"])
def test_two_gpus_answer_as_one(kind: str, tmp_path: Path) -> None:
    tiny_model(kind).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    prompts = [random_prompt(length, length) for length in (5, 60, 300)]
    found = []
    for ranks in (1, 2):
        with gl.Runtime(tmp_path, dtype="float32", tensor_parallel=ranks, cache=CACHE, quiet=True) as runtime:
            alone = [runtime.generate(prompt, **GREEDY).token_ids for prompt in prompts]
            found.append(alone + [answer.token_ids for answer in runtime.generate(prompts * 3, **GREEDY)])
    assert found[0] == found[1]


@pytest.mark.parametrize("signalled", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_is_named_while_its_peer_waits_on_the_device(signalled: signal.Signals, tmp_path: Path) -> None:
    tiny_model("llama", max_position_embeddings=4096).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    many = gl.SamplingParams(max_tokens=4000, temperature=0, ignore_eos=True)
    with gl.Runtime(tmp_path, tensor_parallel=2, cache=CACHE, quiet=True) as runtime:
        runtime.load()
        engine: Any = runtime._thread.engine
        futures = runtime.submit_many([gl.Request(random_prompt(9, seed), many) for seed in range(3)])
        while not runtime.stats().completion_tokens:
            time.sleep(0.001)
        os.kill(engine.runner.crew.followers[0].process.pid, signalled)
        for future in futures:
            with pytest.raises(gl.EngineError, match="rank 1"):
                future.result(60)
