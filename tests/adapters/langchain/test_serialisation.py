"""`dumps` and `loads` of langchain_core: settings survive, keys and runtimes stay out."""

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


def test_a_running_runtime_is_not_written() -> None:
    model = ChatGraftLM(runtime=gl.Runtime.shared("sprout", dtype="float32"))
    assert json.loads(dumps(model))["type"] == "not_implemented"
