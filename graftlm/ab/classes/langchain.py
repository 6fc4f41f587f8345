"""LangChain's classes."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from graftlm.ab.classes.client import Constructor, key, load, served
from graftlm.ab.classes.openvino import one_call_at_a_time, same_work
from graftlm.ab.classes.server import gguf
from graftlm.core.errors import EngineError


def engines(max_tokens: int) -> Mapping[str, Constructor]:
    greedy = {"temperature": 0.0, "max_tokens": max_tokens}

    def openai(model: str, url: str) -> Any:
        return load("langchain_openai").ChatOpenAI(model=model, base_url=url, api_key=key(), **greedy)

    def hf(model: str, **options: Any) -> Any:
        huggingface = load("langchain_huggingface")
        generation = {"max_new_tokens": max_tokens, "do_sample": False, "return_full_text": False}
        pipeline = huggingface.HuggingFacePipeline.from_model_id(
            model, task="text-generation", pipeline_kwargs=generation, **options
        )
        return huggingface.ChatHuggingFace(llm=pipeline)

    def openvino(model: str) -> Any:
        chat = hf(model, backend="openvino", model_kwargs={"ov_config": same_work(model)})
        one_call_at_a_time(chat.llm.pipeline.model)
        return chat

    def llama_cpp(model: str, own: str = "") -> Any:
        chat = load("langchain_community.chat_models").ChatLlamaCpp
        return chat(model_path=gguf(own or model), n_ctx=0, verbose=False, streaming=False, **greedy)

    def outlines(model: str) -> Any:
        chat = load("langchain_community.chat_models.outlines").ChatOutlines
        if not hasattr(load("outlines"), "generate"):
            raise EngineError(
                f"langchain-community's ChatOutlines calls what outlines {version('outlines')} no longer has; "
                "pip install 'outlines<1' datasets"
            )
        return chat(model=model, backend="transformers", max_tokens=max_tokens, streaming=False, model_kwargs={})

    return {
        "hf": hf,
        "graftlm": lambda model: load("graftlm.adapters.langchain").ChatGraftLM(model=model, **greedy),
        "openai": openai,
        **served(openai),
        "llama-cpp": llama_cpp,
        "openvino": openvino,
        "outlines": outlines,
    }


def on_runtime(runtime: Any, max_tokens: int) -> Any:
    return load("graftlm.adapters.langchain").ChatGraftLM(runtime=runtime, temperature=0.0, max_tokens=max_tokens)
