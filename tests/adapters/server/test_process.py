"""The life of a server process: keys, disconnects, limits, the end, and what stops it from starting."""

from __future__ import annotations

import gc
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from graftlm import Runtime
from graftlm.adapters.server.process import load
from graftlm.core.constraint import vocabulary_of
from graftlm.core.grammar.engines.byte_tokenizer import tokenizer_of
from tests.served import Served, started

LONG: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Write a long story about the sea."}],
    "max_tokens": 3000,
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """With a key, and room for two requests."""
    arguments = ["--api-key", "secret", "--api-key", "other", "--max-open-requests", "2", "--drain-timeout", "0.2"]
    with started(tmp_path_factory.mktemp("small"), "sprout", *arguments) as served:
        served.wait_ready()
        yield served


NEVER_LOADS = """
import threading
import graftlm.core.model.source as source

def build_engine(self, wake):
    print("the load has begun", flush=True)
    threading.Event().wait()

source.ModelSource.build_engine = build_engine
"""
"""A load that takes for ever, in the server's process."""

KEY = {"authorization": "Bearer secret"}


def ask(served: Served, path: str, key: str = "secret") -> httpx.Response:
    return httpx.get(served.url + path, headers={"authorization": f"Bearer {key}"})


def open_stream(served: Served) -> Any:
    body = {**LONG, "stream": True}
    return httpx.stream("POST", f"{served.url}/v1/chat/completions", json=body, headers=KEY, timeout=60)


def slots_in_use(served: Served) -> int:
    return int(ask(served, "/server_info").json()["slots_in_use"])


def wait_until(reached: Any, timeout_s: float = 30.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not reached():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "graftlm", "serve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def test_each_key_opens_and_a_wrong_one_does_not(small: Served) -> None:
    assert ask(small, "/v1/models").status_code == 200
    assert ask(small, "/v1/models", "other").status_code == 200
    wrong = ask(small, "/v1/models", "secreT")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (401, "invalid_api_key")
    assert httpx.get(f"{small.url}/v1/models").status_code == 401
    assert httpx.get(f"{small.url}/health").status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_kv_is_free_after_the_client_has_gone(small: Served, stream: bool) -> None:
    body = json.dumps({**LONG, "stream": stream}).encode()
    host, port = re.fullmatch(r"http://(.+):(\d+)", small.url).groups()  # type: ignore[union-attr]
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer secret\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + body)
        wait_until(lambda: slots_in_use(small) > 0)
    wait_until(lambda: slots_in_use(small) == 0)


def test_one_request_too_many_is_told_to_come_back(small: Served) -> None:
    with open_stream(small) as one, open_stream(small) as two:
        lines = one.iter_lines(), two.iter_lines()  # httpx closes a connection whose iterator is gone
        assert all(next(line) for line in lines)
        third = httpx.post(f"{small.url}/v1/chat/completions", json=LONG, headers=KEY)
    assert (third.status_code, third.headers["retry-after"]) == (429, "1")
    assert third.json()["error"]["code"] == "too_many_requests"


def test_sigterm_lets_requests_finish_and_refuses_new_ones(tmp_path: Path) -> None:
    with started(tmp_path, "sprout", "--drain-timeout", "200") as served:
        served.wait_ready()
        body = {**LONG, "max_tokens": 600, "stream": True}  # still under way when the signal is seen
        with httpx.stream("POST", f"{served.url}/v1/chat/completions", json=body, timeout=200) as answer:
            lines = answer.iter_lines()
            next(lines)
            served.process.send_signal(signal.SIGTERM)
            wait_until(lambda: served.get("/health")[0] == 503)
            refused = httpx.post(f"{served.url}/v1/chat/completions", json=LONG)
            rest = list(lines)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
        assert [line for line in rest if line][-1] == "data: [DONE]"
        assert served.process.wait(120) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_model_loads_ends_the_process_without_a_traceback(tmp_path: Path, number: int) -> None:
    (tmp_path / "sitecustomize.py").write_text(NEVER_LOADS)
    with started(tmp_path, "sprout", path=tmp_path) as served:
        assert served.get("/health")[0] == 503
        wait_until(lambda: "the load has begun" in served.log.read_text())
        assert served.end(number, 30) == 0
        assert "Traceback" not in served.log.read_text()


def test_what_is_not_finished_in_time_ends_with_an_error(small: Served) -> None:
    with open_stream(small) as answer:
        lines = answer.iter_lines()
        next(lines)
        small.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert "the runtime was closed" in json.loads(rest[-1].removeprefix("data: "))["error"]["message"]
    assert small.process.wait(120) == 0


def test_a_port_in_use_is_named_before_anything_is_read() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        ended = run("no-such-model", "--port", str(port))
    assert ended.returncode == 1
    assert f"port {port} of 127.0.0.1 cannot be used: Address already in use" in " ".join(ended.stderr.split())


def test_a_public_address_needs_a_key() -> None:
    ended = run("sprout", "--host", "0.0.0.0", "--port", "0")
    assert ended.returncode == 1
    assert "no API key is set" in " ".join(ended.stderr.split())


def test_a_model_that_cannot_be_loaded_ends_the_server_with_its_name(tmp_path: Path) -> None:
    ended = run(str(tmp_path / "missing"), "--port", "0")
    assert ended.returncode == 1
    assert "missing" in ended.stderr


@pytest.mark.parametrize(
    ("option", "part"),
    [("dtpye=float32", "did you mean 'dtype'"), ("dtype", "has no value"), ("cache.max_tokns=1", "max_tokns")],
)
def test_a_bad_runtime_option_is_named(option: str, part: str) -> None:
    ended = run("sprout", "--port", "0", "--option", option)
    assert ended.returncode == 1
    assert part in " ".join(ended.stderr.split())


LOADS = """
import sys
from graftlm import Runtime
from graftlm.adapters.server.process import load

with Runtime("sprout") as runtime:
    load(runtime)
    before = set(sys.modules)
    runtime.generate([{"role": "user", "content": "What is the sea?"}], max_tokens=2)
    print(sorted(name for name in set(sys.modules) - before if name.startswith(("transformers", "jinja2"))))
"""


def test_the_first_message_after_a_load_imports_no_renderer_of_templates() -> None:
    ended = subprocess.run([sys.executable, "-c", LOADS], capture_output=True, text=True, timeout=600)
    assert ended.stdout.splitlines()[-1] == "[]", ended.stderr


def test_a_load_prepares_llguidance_and_takes_what_is_there_from_the_collector() -> None:
    with Runtime("sprout") as runtime:
        try:
            load(runtime)
            assert vocabulary_of(runtime.tokenizer).fingerprint in tokenizer_of
            assert gc.get_freeze_count() > 100_000
        finally:
            gc.unfreeze()
