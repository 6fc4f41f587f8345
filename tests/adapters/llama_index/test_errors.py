"""What a synthesizer must not swallow: it takes every ValueError for an answer that does not parse."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from llama_index.core import Document, Settings, SummaryIndex
from llama_index.core.llms import ChatMessage

import graftlm as gl
from graftlm.adapters.llama_index import GraftCallError, GraftLLM
from graftlm.testing import ScriptedModel

TEXT = "Mara Velin lives in Dorvik and bakes bread, which her neighbours praise. " * 300


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedModel]:
    """A model whose tokens are bytes, with LlamaIndex as a new process finds it but for `Settings.llm`."""
    for name in ("_llm", "_node_parser", "_prompt_helper", "_transformations"):
        monkeypatch.setattr(Settings, name, None)
    model = ScriptedModel(lambda prompt: "She lives in Dorvik.", max_model_len=4096)
    with model.runtime() as runtime:
        Settings.llm = GraftLLM(runtime=runtime)
        yield model


@pytest.mark.parametrize("mode", ["compact", "refine", "tree_summarize"])
def test_prompts_are_packed_by_the_models_own_tokens(model: ScriptedModel, mode: str) -> None:
    Settings.tokenizer = Settings.llm.tokenize
    index = SummaryIndex.from_documents([Document(text=TEXT)])
    assert str(index.as_query_engine(response_mode=mode).query("Where?")) == "She lives in Dorvik."
    assert len(model.prompts) > 5  # with another tokenizer they used to be fewer, and too long
    assert max(len(prompt.encode()) for prompt in model.prompts) <= 4096


@pytest.mark.parametrize("mode", ["compact", "refine"])
def test_a_prompt_that_does_not_fit_used_to_be_an_empty_response(model: ScriptedModel, mode: str) -> None:
    Settings.tokenizer = str.split
    index = SummaryIndex.from_documents([Document(text=TEXT)])
    with (
        pytest.warns(UserWarning, match="Settings.tokenizer counts .* set Settings.tokenizer = llm.tokenize"),
        pytest.raises(gl.RequestTooLong, match="tokens, the context is 4,096"),
    ):
        index.as_query_engine(response_mode=mode).query("Where?")


def test_a_tokenizer_that_counts_enough_stays(model: ScriptedModel) -> None:
    def characters(text: str) -> list[str]:
        return list(text) * 2

    Settings.tokenizer = characters
    assert Settings.llm.complete("x").text and Settings.tokenizer is characters


def test_a_prompt_that_llama_index_packs_too_full_names_the_remedy(model: ScriptedModel) -> None:
    index = SummaryIndex.from_documents([Document(text=TEXT)])
    with pytest.raises(gl.RequestTooLong, match="the context is 4,096.*set Settings.tokenizer = llm.tokenize"):
        index.as_query_engine(response_mode="compact").query("Where?")


def test_a_call_used_to_change_how_later_documents_are_split(model: ScriptedModel) -> None:
    from llama_index.core.node_parser import SentenceSplitter

    def sizes() -> list[int]:
        return [len(text) for text in SentenceSplitter(chunk_size=64, chunk_overlap=0).split_text(TEXT)]

    before, tokenizer = sizes(), Settings.tokenizer
    assert Settings.llm.complete("x").text
    assert Settings.llm.metadata.context_window == 4096
    assert Settings.tokenizer is tokenizer
    assert sizes() == before


@pytest.mark.parametrize(
    "call",
    [
        lambda llm: llm.complete("x", temprature=1),
        lambda llm: list(llm.stream_complete("x", temprature=1)),
        lambda llm: llm.chat([ChatMessage("x")], regex="("),
        lambda llm: list(llm.stream_chat([ChatMessage("x")], regex="(")),
    ],
)
def test_a_call_that_cannot_be_made_is_no_value_error(model: ScriptedModel, call: Callable[[Any], Any]) -> None:
    with pytest.raises(GraftCallError) as raised:
        call(Settings.llm)
    assert not isinstance(raised.value, ValueError)
    assert isinstance(raised.value.__cause__, gl.ConfigError | gl.GrammarError)
