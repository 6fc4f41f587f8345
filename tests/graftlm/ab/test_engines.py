from __future__ import annotations

import pytest

from graftlm.ab.engines import framework_of, named_engines, pip_command, remedy


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
