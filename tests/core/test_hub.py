"""Models by their Hugging Face id where the hub does not answer."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from graftlm.core import hub
from graftlm.core.errors import ConfigError, ModelError
from graftlm.core.runtime import Runtime
from graftlm.core.text.tokenizer import Tokenizer
from tests.models import byte_tokenizer, tiny_model

NAME = "someone/tiny"


class Hub(ThreadingHTTPServer):
    """Answers each request with one status, and counts them."""

    def __init__(self, status: int) -> None:
        self.num_asked = 0

        class Answer(BaseHTTPRequestHandler):
            def do_HEAD(handler) -> None:
                self.num_asked += 1
                handler.send_response(status)
                handler.end_headers()

            def log_message(handler, *_: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Answer)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    hub._asked.clear()
    yield
    hub._asked.clear()


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a port that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize(("status", "reason"), [(404, None), (401, None), (503, "it answers 503")])
def test_a_hub_that_refuses_a_model_is_reached_and_one_that_fails_is_not(
    status: int, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Hub(status) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.address)
        assert hub.unreachable(NAME) == reason
        assert hub.only_local(NAME) is (reason is not None)
        assert server.num_asked == 1  # the second time what it said is known
        server.shutdown()


@pytest.mark.usefixtures("asked")
def test_a_hub_that_is_not_there_or_says_nothing_is_not_reached(silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", closed_port())
    assert "refused" in (hub.unreachable(NAME) or "")
    monkeypatch.setattr(hub, "TIMEOUT_S", 0.2)
    monkeypatch.setenv("HF_ENDPOINT", silent)
    assert "imeout" in (hub.unreachable("someone/else") or "")


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize("name", ["bad name!", "a/b--c..d"])
def test_what_can_be_no_id_is_not_blamed_on_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", closed_port())
    with pytest.raises(ModelError, match=f"no tokenizer could be loaded from '{name}'") as refused:
        Tokenizer.from_pretrained(name)
    assert "repo" in str(refused.value).lower() and "cannot be reached" not in str(refused.value)


@pytest.mark.usefixtures("asked")
def test_it_is_asked_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    with Hub(503) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.address)
        assert hub.unreachable(NAME) is not None
        monkeypatch.setattr(hub, "_FRESH_S", 0.0)
        assert hub.unreachable(NAME) is not None
        assert server.num_asked == 2
        server.shutdown()


def test_a_folder_needs_no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_ask", lambda _: pytest.fail("the hub was asked"))
    assert hub.only_local(str(tmp_path))
    assert hub.why_not(str(tmp_path), OSError("no config.json")) == "OSError: no config.json"


def run(code: str, home: Path) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    environment |= {"HF_HOME": str(home), "HF_ENDPOINT": closed_port()}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)


def test_a_revision_of_local_files_is_refused() -> None:
    with pytest.raises(ConfigError, match="revision is 'v1', but 'sprout' has none; leave revision out"):
        Runtime("sprout", revision="v1")


def test_a_model_in_the_cache_is_loaded_without_asking_for_each_file(tmp_path: Path) -> None:
    repository, commit = tmp_path / "hub/models--someone--tiny", "0123456789abcdef0123456789abcdef01234567"
    snapshot = repository / "snapshots" / commit
    tiny_model().save_pretrained(snapshot)
    byte_tokenizer().save_pretrained(snapshot)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(commit)
    (repository / "refs/v1").write_text(commit)
    code = """
import graftlm as gl
with gl.Runtime("someone/tiny", device="cpu") as runtime:
    print(runtime.generate([5, 6, 7], max_tokens=5, temperature=0, ignore_eos=True).token_ids)
with gl.Runtime("someone/tiny", device="cpu", revision="v1") as runtime:
    assert runtime.model_name == "someone/tiny" and runtime.load()
try:
    gl.Runtime("someone/tiny", device="cpu", revision="v2").load()
except gl.ModelError as error:
    assert "at revision 'v2'" in str(error), error
"""
    found = run(code, tmp_path)
    assert found.returncode == 0, found.stderr[-2000:]
    assert "Retrying" not in found.stderr
    with Runtime(snapshot, device="cpu") as runtime:
        expected = runtime.generate([5, 6, 7], max_tokens=5, temperature=0, ignore_eos=True)
    assert found.stdout == f"{expected.token_ids}\n"
    later = """
import sys
import graftlm as gl
with gl.Runtime("someone/tiny", device="cpu") as runtime:
    print(runtime.generate([5, 6, 7], max_tokens=5, temperature=0, ignore_eos=True).token_ids)
assert "transformers" not in sys.modules  # the first load left a record
"""
    again = run(later, tmp_path)
    assert again.returncode == 0, again.stderr[-2000:]
    assert again.stdout == found.stdout


@pytest.mark.usefixtures("asked")
def test_a_folder_in_the_cache_stands_for_its_id_only_if_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda _, name, revision: str(tmp_path / name))
    monkeypatch.setattr(hub, "_ask", lambda _: hub._Answer(time.monotonic(), commit="0123"))
    assert hub.complete_folder(NAME) is None
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "one.safetensors").touch()
    assert hub.complete_folder(NAME) is None
    (tmp_path / "two.safetensors").touch()
    assert hub.complete_folder(NAME) == str(tmp_path)
    (tmp_path / "config.json").write_text('{"auto_map": {}}')
    assert hub.complete_folder(NAME) is None


def test_a_model_that_is_not_there_is_an_error_that_names_the_hub(tmp_path: Path) -> None:
    code = """
import graftlm as gl
from graftlm.core.errors import ConfigError, ModelError
try:
    gl.Runtime("someone/tiny", device="cpu").load()
except ModelError as error:
    print(error)
"""
    found = run(code, tmp_path)
    assert "Retrying" not in found.stderr
    assert "'someone/tiny': the Hugging Face hub cannot be reached (" in found.stdout
    assert "connect, or give a local folder" in found.stdout
