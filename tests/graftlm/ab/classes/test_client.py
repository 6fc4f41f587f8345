"""How a framework's classes are imported."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from graftlm.ab.classes import server
from graftlm.ab.classes.client import load, served
from graftlm.ab.classes.server import Kind
from graftlm.ab.engines import named_engines, pip_command
from graftlm.core.errors import EngineError
from tests.core.remote.models import answers
from tests.core.remote.server import Server


def test_a_missing_part_of_a_namespace_is_told_by_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llama_index").mkdir()  # as llama-index-core alone leaves it: nothing under llama_index.llms
    for name in [name for name in sys.modules if name.partition(".")[0] == "llama_index"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ModuleNotFoundError) as missing:
        load("llama_index.llms.openai_like")
    assert pip_command(missing.value) == "pip install llama-index-llms-openai-like"


def test_what_a_module_misses_itself_keeps_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needs_another.py").write_text("import not_installed_here\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError) as missing:
        load("needs_another")
    assert missing.value.name == "not_installed_here"


def test_a_running_server_is_asked_for_a_model_that_it_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """All requests were answered with 404, and a pipeline that goes on after errors was fast."""
    kinds = {"vllm": Kind(("http",), lambda model, port: [], "/v1/models", lists=True)}
    monkeypatch.setattr(server, "KINDS", kinds)
    start = served(lambda model, url: (model, url), ("vllm",))["vllm"]
    with Server(answers({})) as running:
        url = running.url.removesuffix("/v1")
        told = re.escape(f"vllm at {url} has no model 'folder', but 'm'; name one of them: vllm:{url}#m")
        with pytest.raises(EngineError, match=told):
            start("folder", url)
        assert server.Server.open == []
        assert start("folder", f"{url}#m") == ("m", f"{url}/v1") == start("m", url)
        server.Server.open[:] = []


def test_an_endpoint_may_know_the_model_by_another_name() -> None:
    openai = named_engines("dspy", 8)["openai"]
    names = [openai("folder", url).model for url in ("http://127.0.0.1:9/v1#m", "http://127.0.0.1:9/v1")]
    assert names == ["openai/m", "openai/folder"]
