"""LlamaIndex's classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graftlm.ab.classes.client import Constructor, key, load, served
from graftlm.ab.classes.openvino import one_call_at_a_time, same_work
from graftlm.ab.classes.server import gguf


def engines(max_tokens: int) -> Mapping[str, Constructor]:
    greedy = {"temperature": 0.0, "max_tokens": max_tokens}

    def openai(model: str, url: str) -> Any:
        like = load("llama_index.llms.openai_like").OpenAILike
        return like(model=model, api_base=url, api_key=key(), is_chat_model=True, **greedy)

    local = {"is_chat_model": True, "max_new_tokens": max_tokens, "generate_kwargs": {"do_sample": False}}

    def hf(model: str) -> Any:
        kind = load("llama_index.llms.huggingface").HuggingFaceLLM
        return _as_chat(kind(model_name=model, tokenizer_name=model, **local))

    def llama_cpp(model: str, own: str = "") -> Any:
        return load("llama_index.llms.llama_cpp").LlamaCPP(
            model_path=gguf(own or model), temperature=0.0, max_new_tokens=max_tokens, verbose=False
        )

    def openvino(model: str) -> Any:
        kind = load("llama_index.llms.openvino").OpenVINOLLM
        llm = kind(model_id_or_path=model, device_map="cpu", model_kwargs={"ov_config": same_work(model)}, **local)
        one_call_at_a_time(llm._model)
        return _as_chat(llm)

    return {
        "hf": hf,
        "graftlm": lambda model: load("graftlm.adapters.llama_index").GraftLLM(model=model, **greedy),
        "openai": openai,
        **served(openai),
        "llama-cpp": llama_cpp,
        "openvino": openvino,
    }


def _as_chat(llm: Any) -> Any:
    """Let `complete` ask a model with a chat template as a chat, as `OpenAILike` and GraftLM's class do."""
    if getattr(llm._tokenizer, "chat_template", None):
        message = load("llama_index.core.llms").ChatMessage(content="{query_str}")
        llm.query_wrapper_prompt = load("llama_index.core").PromptTemplate(llm.messages_to_prompt([message]))
    return llm


def on_runtime(runtime: Any, max_tokens: int) -> Any:
    return load("graftlm.adapters.llama_index").GraftLLM(runtime=runtime, temperature=0.0, max_tokens=max_tokens)
