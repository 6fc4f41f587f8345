"""What a newcomer reads of every adapter: its repr, and what it says to a misspelt keyword."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest

import graftlm as gl
from graftlm.adapters import dspy, guidance, langchain, llama_index
from graftlm.adapters.langchain.errors import as_langchain_error

ADAPTERS: dict[str, Callable[..., Any]] = {
    "ChatGraftLM": langchain.ChatGraftLM,
    "GraftLLM": langchain.GraftLLM,
    "GraftLLM of LlamaIndex": llama_index.GraftLLM,
    "GraftLM": dspy.GraftLM,
    "GraftModel": lambda **options: guidance.GraftModel(**{"echo": False, **options}),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_the_repr_of_a_model_object_names_the_model(name: str) -> None:
    text = repr(ADAPTERS[name](model="sprout"))
    assert text.replace("model=", "") == f"{name.split()[0]}('sprout')"


def test_printing_a_model_object_shows_what_was_set_and_no_key() -> None:
    llm = langchain.ChatGraftLM(model="sprout", temperature=0.5, api_key="secret")
    assert str(llm) == "ChatGraftLM(model='sprout', api_key=SecretStr('**********'), temperature=0.5)"


@pytest.mark.parametrize(
    ("wrong", "meant"), [("modle", "model"), ("dtpye", "dtype"), ("max_model_length", "max_model_len")]
)
@pytest.mark.parametrize("name", ADAPTERS)
def test_a_misspelt_keyword_names_the_one_that_was_meant(name: str, wrong: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"unknown {name.split()[0]} parameter '{wrong}'; did you mean '{meant}'"):
        ADAPTERS[name](**{wrong: "x"})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dspy.GraftLM(max_tokenz=1), "'max_tokenz'; did you mean 'max_tokens'"),
        (lambda: dspy.GraftLM(num_retry=1), "'num_retry'; did you mean 'num_retries'"),
        (lambda: dspy.GraftAdapter(callback=1), "GraftAdapter parameter 'callback'; did you mean 'callbacks'"),
        (lambda: guidance.GraftModel(eko=1), "'eko'; did you mean 'echo'"),
        (lambda: langchain.ChatGraftLM(tag=["a"]), "'tag'; did you mean 'tags'"),
        (lambda: llama_index.GraftLLM(sytem_prompt="x"), "'sytem_prompt'; did you mean 'system_prompt'"),
    ],
)
def test_a_misspelt_name_of_the_framework_is_recognised(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("name", [name for name in ADAPTERS if name != "GraftModel"])
def test_model_objects_can_be_pickled_and_share_the_runtime(name: str) -> None:
    again = pickle.loads(pickle.dumps(ADAPTERS[name](model="sprout", temperature=0.5)))
    assert "sprout" in repr(again)
    runtime = again.runtime if name == "GraftLM" else again.runtime_for()
    assert runtime is gl.Runtime.shared("sprout")


def test_errors_of_langchain_survive_pickling() -> None:
    error = as_langchain_error(gl.RequestTooLong("x", length=9, limit=8))
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.length) == (type(error), "x", 9)
