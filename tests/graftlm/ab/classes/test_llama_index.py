from __future__ import annotations

from llama_index.core.llms import ChatMessage

from graftlm.ab.classes.llama_index import engines
from graftlm.core.model.embedded import sprout_path


def test_a_completion_of_a_chat_model_is_asked_as_a_chat() -> None:
    """The text went to the model as it was, on this engine alone: it answered another question than the others."""
    llm = engines(6)["hf"](str(sprout_path()))
    text = "Ada is a baker. What is Ada?"
    assert [*llm.stream_complete(text)][-1].text == "baker"
    assert llm.complete(text).text == llm.chat([ChatMessage(content=text)]).message.content == "baker"
