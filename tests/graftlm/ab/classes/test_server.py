"""Servers are real processes on 127.0.0.1."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import psutil
import pytest

from graftlm.ab.classes import server
from graftlm.ab.classes.client import served
from graftlm.ab.classes.server import Kind, Server, gguf
from graftlm.core.errors import EngineError
from tests.models import byte_tokenizer, tiny_model


def kind(monkeypatch: pytest.MonkeyPatch, *command: str, package: str = "http") -> None:
    monkeypatch.setattr(server, "KINDS", {"files": Kind((package,), lambda model, port: [*command, str(port)], "/")})


def test_a_server_answers_at_its_url_and_ends_when_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    serve = "import http.server as h, sys; h.test(h.SimpleHTTPRequestHandler, port=int(sys.argv[1]), bind='127.0.0.1')"
    kind(monkeypatch, "-c", serve)
    running = Server("files", "any")
    assert running.url.startswith("http://127.0.0.1:") and running.url.endswith("/v1")
    assert Server.open == [running] and psutil.pid_exists(running.pid)
    assert running.reset() is False
    running.close()
    assert Server.open == [] and not psutil.pid_exists(running.pid)


def test_a_server_that_ends_at_once_is_an_error_with_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    kind(monkeypatch, "-c", "raise SystemExit('no such device')")
    with pytest.raises(EngineError, match="of files ended with status 1: no such device"):
        Server("files", "any")
    assert Server.open == []


def test_a_server_that_ends_later_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    serve = "import http.server as h, sys; h.test(h.SimpleHTTPRequestHandler, port=int(sys.argv[1]), bind='127.0.0.1')"
    kind(monkeypatch, "-c", serve)
    running = Server("files", "any")
    assert running.end == ""
    running._process.kill()
    running._process.wait()
    assert "the server of files ended with signal 9 (SIGKILL: perhaps for want of memory): " in running.end
    running.close()


def test_transformers_server_takes_no_more_memory_than_its_blocks_and_can_be_emptied(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """On a CPU it used to take all free memory at its first chat, which then had no answer in 20 s."""
    folder = str(tmp_path_factory.mktemp("model"))
    tiny_model().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    running = Server("hf-batching", folder)
    try:
        body = {"model": folder, "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 4}
        request = urllib.request.Request(
            f"{running.url}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] > 0
        assert running.reset() is True
        assert psutil.Process(running.pid).memory_info().rss < 2 * 2**30
    finally:
        running.close()


def test_a_running_server_is_used_and_left_running(monkeypatch: pytest.MonkeyPatch) -> None:
    serve = "import http.server as h, sys; h.test(h.SimpleHTTPRequestHandler, port=int(sys.argv[1]), bind='127.0.0.1')"
    kind(monkeypatch, "-c", serve)
    started = Server("files", "any")
    found = Server("files", started.url)
    assert (found.url, found.pid, found.end) == (started.url, started.pid, "")
    found.close()
    assert Server.open == [started] and started.end == ""
    started.close()


def test_a_running_server_that_does_not_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    kind(monkeypatch, "-c", "")
    monkeypatch.setattr(server, "RUNNING_S", 0.1)
    with pytest.raises(EngineError, match=r"the server of files did not answer http://127\.0\.0\.1:9/ within 0 s"):
        Server("files", "http://127.0.0.1:9/v1")
    assert Server.open == []


def test_a_client_asks_a_running_server_for_the_model_of_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    serve = "import http.server as h, sys; h.test(h.SimpleHTTPRequestHandler, port=int(sys.argv[1]), bind='127.0.0.1')"
    kind(monkeypatch, "-c", serve)
    running = Server("files", "any")
    constructors = served(lambda model, url: (model, url), ("files",))
    assert constructors["files"]("folder", running.url) == ("folder", running.url)
    for one in [*Server.open]:
        one.close()


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    kind(monkeypatch, "-c", "", package="a_package_that_nobody_has")
    with pytest.raises(ModuleNotFoundError) as raised:
        Server("files", "any")
    assert raised.value.name == "a_package_that_nobody_has"


def test_llama_cpp_takes_the_one_gguf_file_of_a_folder(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"holds 0 of them; convert it .* llama-cpp:model\.gguf"):
        gguf(str(tmp_path))
    (tmp_path / "model.gguf").write_bytes(b"")
    assert gguf(str(tmp_path)) == gguf(str(tmp_path / "model.gguf")) == str(tmp_path / "model.gguf")
