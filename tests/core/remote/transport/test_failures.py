"""Refusals of an endpoint whose context is too small, in the words of many servers."""

from __future__ import annotations

from typing import Any

import dspy
import pytest
from langchain_core.exceptions import ContextOverflowError

import graftlm as gl
from graftlm.adapters.dspy import GraftLM
from graftlm.adapters.langchain import ChatGraftLM
from graftlm.core.errors import RemoteTooLong
from tests.core.remote.models import writes
from tests.core.remote.server import Fault, Server

TOO_LONG = {
    "OpenAI": "This model's maximum context length is 8192 tokens. However, your messages resulted in 9000 tokens.",
    "OpenAI responses": "Your input exceeds the context window of this model. Please adjust your input and try again.",
    "vLLM": "The decoder prompt (length 9000) is longer than the maximum model length of 4096.",
    "SGLang": "The input (9000 tokens) is longer than the model's context length (4096 tokens).",
    "SGLang, with the answer": "Requested token count exceeds the model's maximum context length of 4096 tokens.",
    "llama.cpp": "the request exceeds the available context size. try increasing the context size",
    "llama.cpp, newer": "request (5000 tokens) exceeds the available context size (4096 tokens), try increasing it",
    "Ollama": "the input length exceeds the context length",
    "LM Studio": "However, the model is loaded with context length of only 4096 tokens, which is not enough.",
    "Anthropic": "prompt is too long: 200001 tokens > 200000 maximum",
    "Gemini": "The input token count (1200000) exceeds the maximum number of tokens allowed (1048576).",
    "Mistral": "Prompt contains 40000 tokens, too large for model with 32768 maximum context length",
    "TGI": "Input validation error: `inputs` must have less than 1024 tokens. Given: 1500",
    "TGI, with the answer": "`inputs` tokens + `max_new_tokens` must be <= 2048. Given: 2000 and 100",
    "Cohere": "too many tokens: total number of tokens in the prompt cannot exceed 4081 - received 5000.",
    "Bedrock": "Input is too long for requested model.",
    "xAI": "This model's maximum prompt length is 131072 but the request contains 140000 tokens.",
    "Groq": "Please reduce the length of the messages or completion. Current length is 9000 while limit is 8192",
    "TensorRT-LLM": "Prompt length (5000) exceeds maximum input length (4096)",
    "DashScope": "Range of input length should be [1, 30720]",
    "Moonshot": "Invalid request: Your request exceeded model token limit: 8192",
    "GraftLM": "prompt is 9,120 tokens, the context is 8,192; shorten it or raise max_model_len",
}
ELSE = {
    "a rate limit": "Rate limit reached for m: Limit 10000 tokens per min (TPM). Requested 12000 tokens.",
    "a long answer": "max_tokens is too large: 9999. This model supports at most 4096 completion tokens",
    "a long field": "string too long. Expected a string with maximum length 512",
    "caching": "this model does not support context caching",
}


def refusing(words: str) -> Server:
    """A server that answers every request with status 400 and these words."""
    return Server(writes("x"), faults=[Fault(status=400, body={"error": {"message": words}})] * 20)


def runtime(server: Server) -> gl.Runtime:
    return gl.Runtime("m", base_url=server.url, api_key="k", max_retries=0)


@pytest.mark.parametrize("words", TOO_LONG.values(), ids=TOO_LONG)
def test_a_prompt_that_is_too_long_used_to_be_any_refusal(words: str) -> None:
    with refusing(words) as server, runtime(server) as rt:
        with pytest.raises(gl.RequestTooLong, match="shorten the prompt") as caught:
            rt.generate("go")
        assert isinstance(caught.value, RemoteTooLong) and not caught.value.transient
        with pytest.raises(ContextOverflowError):
            ChatGraftLM(runtime=rt).invoke("go")
        with pytest.raises(dspy.ContextWindowExceededError):
            GraftLM(runtime=rt)("go")


@pytest.mark.parametrize("words", ELSE.values(), ids=ELSE)
def test_other_refusals_that_name_a_length_are_none(words: str) -> None:
    with refusing(words) as server, runtime(server) as rt:
        with pytest.raises(gl.RemoteError) as caught:
            rt.generate("go")
        assert not isinstance(caught.value, gl.RequestTooLong)


def test_the_name_of_a_value_keeps_the_kind_of_its_error() -> None:
    @gl.program
    def one(s: Any) -> None:
        s += "go " + gl.gen("answer", max_tokens=4)

    with refusing(TOO_LONG["vLLM"]) as server, runtime(server) as rt:
        state = one.run(runtime=rt)
        with pytest.raises(gl.RequestTooLong, match="gen 'answer'"):
            state["answer"]
