"""Replicas on a real Ray, started for this test on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

import graftlm as gl
from graftlm.core.cluster.engine import ReplicaEngine
from graftlm.testing.random_vision import random_picture, save_vision_model
from tests.models import byte_tokenizer, tiny_model
from tests.vision import question

ray = pytest.importorskip("ray")

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own
ROOT = Path(__file__).parents[3]
GREEDY: dict[str, Any] = {"max_tokens": 16, "temperature": 0, "ignore_eos": True}
PROMPTS = [f"House {name}. " + "Keep to the rules. " * 30 + f"Person {i}?" for i in range(4) for name in "abcd"]


def run_apart(function: str) -> None:
    """Run a function of this file in a process of its own: Ray's threads and signal handlers stay out of this one.

    Its folder names a cluster that somebody started on this machine, which is not joined.
    """
    code = f"from tests.core.cluster.test_ray_cluster import {function}; {function}()"
    command = [sys.executable, "-W", "ignore", "-c", code]
    with tempfile.TemporaryDirectory(prefix="graftlm-") as folder:  # short: Ray's sockets lie below it
        (Path(folder) / "ray").mkdir()
        (Path(folder) / "ray" / "ray_current_cluster").write_text("127.0.0.1:1")
        environment = {**os.environ, "RAY_TMPDIR": folder}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=500)
    assert done.returncode == 0, (done.stdout[-2000:] + done.stderr[-4000:]).decode()


def test_two_actors_answer_as_one_runtime_and_one_is_killed_under_requests() -> None:
    run_apart("two_actors")


def test_two_actors_answer_questions_about_pictures_and_encode_each_once() -> None:
    pytest.importorskip("PIL")
    run_apart("two_actors_and_pictures")


def two_actors() -> None:
    with gl.Runtime("sprout", dtype="float32") as one:
        expected = [answer.token_ids for answer in one.generate(PROMPTS, **GREEDY)]
    with gl.Runtime("sprout", dtype="float32", engine="ray", replicas=2) as runtime:
        answers = runtime.generate(PROMPTS, **GREEDY)
        assert [answer.token_ids for answer in answers] == expected
        assert runtime.stats().requests == len(PROMPTS)
        engine: Any = runtime._thread.engine
        assert isinstance(engine, ReplicaEngine)
        each = [member.stats().computed_tokens for member in engine.members.values()]
        assert abs(each[0] - each[1]) <= 0.02 * sum(each)
        assert "".join(chunk.text for chunk in runtime.stream(PROMPTS[0], **GREEDY)) == answers[0].text
        with pytest.raises(gl.GrammarError, match="not closed"):
            runtime.generate("x", regex="a((")

        runtime.clear_cache()
        futures = runtime.submit_many([gl.Request(p, gl.SamplingParams(**GREEDY)) for p in PROMPTS])
        os.kill(next(iter(engine.members.values())).pid, signal.SIGKILL)
        assert [future.result(300).token_ids for future in futures] == expected
        assert engine.deaths == 1
    assert not ray.is_initialized()


def two_actors_and_pictures() -> None:
    """Ask two actors about pictures whose tokens fill more than one block of the router."""
    pictures = [random_picture(seed, 480, 360) for seed in range(4)]
    loaded: dict[str, Any] = {"dtype": "float32", "mm_processor_kwargs": {"max_pixels": 480 * 360}}
    prompts = [question(f"What is {i}?", one) for i in range(3) for one in pictures] + [question("No picture")]
    options: dict[str, Any] = {"max_tokens": 8, "temperature": 0}
    with tempfile.TemporaryDirectory(prefix="graftlm-") as folder:
        save_vision_model("qwen2_5_vl", folder)
        with gl.Runtime(folder, **loaded) as one:
            expected = [answer.token_ids for answer in one.generate(prompts, **options)]
        with gl.Runtime(folder, engine="ray", replicas=2, **loaded) as runtime:
            answers = runtime.generate(prompts, **options)
            assert [answer.token_ids for answer in answers] == expected
            encoded = runtime.stats().images_encoded
            assert len(pictures) <= encoded < 2 * len(pictures), encoded
            engine: Any = runtime._thread.engine
            assert all(member.stats().images for member in engine.members.values())
            for prompt, first in zip(prompts, answers, strict=True):  # of several turns, in any order of replicas
                again = runtime.generate(prompt, **options)
                assert again.token_ids == first.token_ids
                assert again.usage.cached_tokens > again.usage.prompt_tokens // 2
            assert runtime.stats().images_encoded == encoded
            with pytest.raises(gl.ConfigError, match="message 0"):
                runtime.generate(question("What is it?", b"no picture"), **options)
    assert not ray.is_initialized()


def test_what_cannot_be_sent_to_replicas_is_named_before_ray_is_started() -> None:
    with gl.Runtime("sprout", engine="ray", device="cuda:1") as runtime, pytest.raises(gl.ConfigError, match="cuda:1"):
        runtime.load()
    loaded = gl.Runtime(tiny_model(), tokenizer=byte_tokenizer(), engine="ray")
    with loaded as runtime, pytest.raises(gl.ConfigError, match="give its name or folder"):
        runtime.load()
    assert not ray.is_initialized()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1"])
def test_a_cluster_where_nobody_listens_is_named_at_once(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    message = rf"the Ray cluster at {address} cannot be reached: ConnectionRefusedError.*RAY_AUTH_TOKEN"
    with gl.Runtime("sprout", engine="ray", replicas=2) as runtime, pytest.raises(gl.ConfigError, match=message):
        runtime.load()
    assert not ray.is_initialized()
