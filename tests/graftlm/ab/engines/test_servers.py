"""Servers are real processes on 127.0.0.1."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path

import psutil
import pytest

from graftlm.ab.engines import servers
from graftlm.ab.engines.frameworks import named_engines
from graftlm.ab.engines.servers import Server, gguf
from graftlm.core.errors import EngineError
from tests.models import byte_tokenizer, tiny_model

READY = """
import http.server as h, sys
class Ready(h.BaseHTTPRequestHandler):
    resets = ["/flush_cache"]
    def answer(self): self.send_response(200 if self.path in ["/health", *self.resets] else 404); self.end_headers()
    do_GET = do_POST = answer
h.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Ready).serve_forever()
"""
CHILD = "import os; from graftlm.ab.engines.servers import end_with; print('on', flush=True); end_with({parent})"
PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1].format(parent=os.getpid())], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""


@pytest.fixture(autouse=True)
def _no_server_stays() -> object:
    yield
    for server in [*Server.open]:
        server.close()


def kind(monkeypatch: pytest.MonkeyPatch, program: str, package: str = "http") -> None:
    monkeypatch.setattr(servers, "SERVERS", {"vllm": ((package,), lambda model: ["-c", program, model])})


def test_a_server_answers_at_its_url_and_ends_when_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    kind(monkeypatch, READY)
    running = Server.start("vllm", "any")
    assert running.url.startswith("http://127.0.0.1:") and running.url.endswith("/v1")
    assert Server.open == [running] and psutil.pid_exists(running.pid or 0)
    running.close()
    assert Server.open == [] and not psutil.pid_exists(running.pid or 0)


@pytest.mark.parametrize(("paths", "empties"), [("/flush_cache", True), ("/other", False)])
def test_a_cache_is_emptied_by_whichever_request_the_server_has(
    monkeypatch: pytest.MonkeyPatch, paths: str, empties: bool
) -> None:
    kind(monkeypatch, READY.replace("/flush_cache", paths))
    running = Server.start("vllm", "any")
    assert [running.reset(), running.reset()] == [empties, empties]


def test_a_server_that_ends_at_once_is_an_error_with_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    kind(monkeypatch, "raise SystemExit('no such device')")
    with pytest.raises(EngineError, match="of vllm ended with status 1: no such device"):
        Server.start("vllm", "any")
    assert Server.open == []


def test_a_server_that_ends_later_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    kind(monkeypatch, READY)
    running = Server.start("vllm", "any")
    assert running.end == ""
    assert running._process is not None
    running._process.kill()
    running._process.wait()
    assert "the server of vllm ended with signal 9 (SIGKILL: perhaps for want of memory): " in running.end


def test_a_server_whose_parent_is_killed_ends() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    server = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    psutil.wait_procs([server], timeout=60)
    assert not server.is_running() or server.status() == psutil.STATUS_ZOMBIE


def test_transformers_server_takes_no_more_memory_than_its_blocks_and_can_be_emptied(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """On a CPU it used to take all free memory at its first chat, which then had no answer in 20 s."""
    folder = str(tmp_path_factory.mktemp("model"))
    tiny_model().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    running = Server.start("hf-batching", folder)
    body = {"model": folder, "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 4}
    request = urllib.request.Request(
        f"{running.url}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] > 0
    assert running.reset() is True
    assert psutil.Process(running.pid).memory_info().rss < 2 * 2**30


def test_a_running_server_is_used_by_each_of_its_names_and_left_running(monkeypatch: pytest.MonkeyPatch) -> None:
    kind(monkeypatch, READY)
    started = Server.start("vllm", "any")
    known = named_engines("dspy", 8)
    for name, where in (("openai", started.url), ("vllm", started.url.removesuffix("/v1")), ("vllm", started.url)):
        assert known[name]("folder", where).kwargs["api_base"] == started.url
        found = Server.open[-1]
        assert (found.pid, found.end, found.reset()) == (started.pid, "", True)
        found.close()
    assert Server.open == [started] and started.end == ""


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    kind(monkeypatch, "", package="a_package_that_nobody_has")
    with pytest.raises(ModuleNotFoundError) as raised:
        Server.start("vllm", "any")
    assert raised.value.name == "a_package_that_nobody_has"


def test_llama_cpp_takes_the_one_gguf_file_of_a_folder(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"holds 0 of them; convert it .* llama-cpp:model\.gguf"):
        gguf(str(tmp_path))
    (tmp_path / "model.gguf").write_bytes(b"")
    assert gguf(str(tmp_path)) == gguf(str(tmp_path / "model.gguf")) == str(tmp_path / "model.gguf")
