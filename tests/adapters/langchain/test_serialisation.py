"""LangChain's own ways to a model: `dumps` and `loads` keep settings, not keys; `init_chat_model` knows "graftlm"."""

from __future__ import annotations

import json

import pytest
from langchain_core.load import dumps, loads

import graftlm as gl
from graftlm.adapters.langchain import ChatGraftLM, GraftLLM


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [ChatGraftLM, GraftLLM])
def test_a_model_is_written_and_read(kind: type[ChatGraftLM | GraftLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    model = kind(model="sprout", temperature=0.5, stop=["x"], dtype="float32", max_tokens=7, api_key="hidden")
    text = dumps(model)
    assert "hidden" not in text
    monkeypatch.setenv("GRAFTLM_API_KEY", "hidden")
    again = loads(text, allowed_objects=[kind], valid_namespaces=["graftlm"], secrets_from_env=True)
    assert type(again) is kind
    assert again == model


def test_langchain_builds_a_model_by_its_provider() -> None:
    from langchain.agents import create_agent
    from langchain.chat_models import init_chat_model

    model = init_chat_model("graftlm:sprout", temperature=0.5, torch_dtype="float32", device_map="cpu")
    assert model == ChatGraftLM(model="sprout", temperature=0.5, dtype="float32", device="cpu")
    assert create_agent("graftlm:sprout", tools=[]) is not None


def test_a_running_runtime_is_not_written() -> None:
    model = ChatGraftLM(runtime=gl.Runtime.shared("sprout", dtype="float32"))
    assert json.loads(dumps(model))["type"] == "not_implemented"
