"""Each framework's own classes, and how they are imported; DSPy over plain transformers on every path of an LM."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import dspy
import pytest
from llama_index.core.llms import ChatMessage

from graftlm.ab.engines.frameworks import framework_of, load, named_engines, pip_command, remedy
from graftlm.ab.engines.servers import Server
from graftlm.core.model.embedded import sprout_path
from tests.models import byte_tokenizer, tiny_model


@pytest.mark.parametrize(
    ("source", "framework"),
    [
        ("import dspy", "dspy"),
        ("import json\nfrom langchain_core.prompts import ChatPromptTemplate", "langchain"),
        ("from llama_index.core import Document", "llama_index"),
        ("from guidance import gen", "guidance"),
        ("import graftlm as gl", "native"),
        ("import json\ndef f():\n    import dspy", None),
    ],
)
def test_the_framework_is_told_from_the_imports(source: str, framework: str | None) -> None:
    assert framework_of(source) == framework


@pytest.mark.parametrize("framework", ["langchain", "dspy", "llama_index", "guidance"])
def test_every_framework_knows_transformers_graftlm_and_endpoints(framework: str) -> None:
    assert {"hf", "graftlm", "openai"} <= set(named_engines(framework, 16))


def test_the_pip_command_names_the_package_that_is_missing() -> None:
    assert pip_command(ModuleNotFoundError("x", name="langchain_openai.chat")) == "pip install langchain-openai"
    missing = ModuleNotFoundError("x", name="llama_index.llms.openai_like.base")
    assert pip_command(missing) == "pip install llama-index-llms-openai-like"
    assert pip_command(ModuleNotFoundError("x", name="llama_index")) == "pip install llama-index-core"
    assert pip_command(ValueError("x")) == ""
    lazy = ModuleNotFoundError("Could not import module 'OVModelForCausalLM'")
    lazy.__cause__ = ModuleNotFoundError("x", name="tabulate")
    assert pip_command(lazy) == "pip install tabulate"


def test_what_a_stock_class_does_not_have_is_said_with_another_engine() -> None:
    assert "hf-batching,graftlm" in remedy(NotImplementedError("no async calls"))
    no_stream = AttributeError("'HuggingFacePipeline' object has no attribute 'async_client'")
    assert "hf-batching,graftlm" in remedy(no_stream)
    assert "name another engine" in remedy(NotImplementedError("Pydantic schema is not supported"))
    assert remedy(ValueError("x")) == ""


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


def test_an_endpoint_may_know_the_model_by_another_name() -> None:
    Server.open.clear()
    openai = named_engines("dspy", 8)["openai"]
    names = [openai("folder", url).model for url in ("http://127.0.0.1:9/v1#m", "http://127.0.0.1:9/v1")]
    assert names == ["openai/m", "openai/folder"]
    Server.open.clear()


def test_a_completion_of_a_chat_model_is_asked_as_a_chat() -> None:
    """The text went to the model as it was, on this engine alone: it answered another question than the others."""
    llm = named_engines("llama_index", 6)["hf"](str(sprout_path()))
    text = "Ada is a baker. What is Ada?"
    assert [*llm.stream_complete(text)][-1].text == "baker"
    assert llm.complete(text).text == llm.chat([ChatMessage(content=text)]).message.content == "baker"


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return named_engines("dspy", 4)["hf"](str(folder))


def test_asynchronous_calls_answer_as_waiting_ones(lm: Any) -> None:
    async def both() -> list[Any]:
        return await asyncio.gather(lm.acall("Hello"), lm.acall("Hello"))

    assert asyncio.run(both()) == [lm("Hello"), lm("Hello")]


def test_streams_answer_as_calls(lm: Any) -> None:
    async def streamed(program: Any) -> str:
        async for chunk in dspy.streamify(program)(text="Hello"):
            if isinstance(chunk, dspy.Prediction):
                return str(chunk.answer)
        raise AssertionError("the stream ended without a prediction")

    class Ask(dspy.Module):
        def forward(self, text: str) -> Any:
            return dspy.Prediction(answer=lm(text)[0])

        async def aforward(self, text: str) -> Any:
            return dspy.Prediction(answer=(await lm.acall(text))[0])

    (expected,) = lm("Hello")
    assert asyncio.run(streamed(Ask())) == expected
