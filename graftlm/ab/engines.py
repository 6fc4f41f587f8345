"""Engines by name: each framework's own class for an engine, so that a pipeline file needs no constructor lines."""

from __future__ import annotations

import ast
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

from graftlm.core.errors import ConfigError

Constructor = Callable[..., Any]
MAX_TOKENS = 256
"""Generated tokens per call at most, the same for every engine; a pipeline file may set its own `max_tokens`."""

_ROOTS = {
    "langchain": "langchain",
    "langchain_core": "langchain",
    "langgraph": "langchain",
    "dspy": "dspy",
    "llama_index": "llama_index",
    "guidance": "guidance",
    "graftlm": "native",
}
_PIP_NAMES = {
    "llama_index": "llama-index-core",
    "llama_index.llms": "llama-index-llms-huggingface",
    "llama_index.llms.huggingface": "llama-index-llms-huggingface",
    "llama_index.llms.openai_like": "llama-index-llms-openai-like",
}


def framework_of(source: str) -> str | None:
    """The framework that a pipeline's module-level imports name first; "native" for GraftLM's own programs."""
    for node in ast.parse(source).body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            if (root := name.partition(".")[0]) in _ROOTS:
                return _ROOTS[root]
    return None


def pip_command(error: BaseException) -> str:
    """The command that installs the package whose absence `error` reports; empty for any other error."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return ""
    root = error.name.partition(".")[0]
    return f"pip install {_PIP_NAMES.get(error.name) or _PIP_NAMES.get(root) or root.replace('_', '-')}"


def named_engines(framework: str | None, max_tokens: int) -> Mapping[str, Constructor]:
    """The engines that a framework's pipeline can use without constructors of its own. All of them are greedy.

    Each takes the model, as a folder or a Hugging Face id; `openai` takes the base URL as well.
    """
    greedy = {"temperature": 0.0, "max_tokens": max_tokens}
    match framework:
        case "langchain":
            return {
                "hf": lambda model: _langchain_hf(model, max_tokens),
                "graftlm": lambda model: _import("graftlm.adapters.langchain").ChatGraftLM(model=model, **greedy),
                "openai": lambda model, url: _import("langchain_openai").ChatOpenAI(
                    model=model, base_url=url, api_key=_key(), **greedy
                ),
            }
        case "dspy":
            return {
                "hf": lambda model: _dspy_hf(model, max_tokens),
                "graftlm": lambda model: _import("graftlm.adapters.dspy").GraftLM(model, cache=False, **greedy),
                "openai": lambda model, url: _import("dspy").LM(
                    f"openai/{model}", api_base=url, api_key=_key(), cache=False, **greedy
                ),
            }
        case "llama_index":
            return {
                "hf": lambda model: _import("llama_index.llms.huggingface").HuggingFaceLLM(
                    model_name=model,
                    tokenizer_name=model,
                    is_chat_model=True,
                    max_new_tokens=max_tokens,
                    generate_kwargs={"do_sample": False},
                ),
                "graftlm": lambda model: _import("graftlm.adapters.llama_index").GraftLLM(model=model, **greedy),
                "openai": lambda model, url: _import("llama_index.llms.openai_like").OpenAILike(
                    model=model, api_base=url, api_key=_key(), is_chat_model=True, **greedy
                ),
            }
        case "guidance":
            return {
                "hf": lambda model: _import("guidance").models.Transformers(model, echo=False),
                "graftlm": lambda model: _import("graftlm.adapters.guidance").GraftModel(model, echo=False),
                "openai": lambda model, url: _import("guidance").models.OpenAI(
                    model, base_url=url, api_key=_key(), echo=False
                ),
            }
        case "native":
            return {"graftlm": lambda model: _import("graftlm.core.runtime").Runtime(model)}
    return {}


def _import(module: str) -> Any:
    import importlib

    return importlib.import_module(module)


def _key() -> str:
    return os.environ.get("GRAFTLM_API_KEY") or os.environ.get("OPENAI_API_KEY") or "none"


def _langchain_hf(model: str, max_tokens: int) -> Any:
    huggingface = _import("langchain_huggingface")
    generation = {"max_new_tokens": max_tokens, "do_sample": False, "return_full_text": False}
    pipeline = huggingface.HuggingFacePipeline.from_model_id(model, task="text-generation", pipeline_kwargs=generation)
    return huggingface.ChatHuggingFace(llm=pipeline)


def _dspy_hf(model: str, max_tokens: int) -> Any:
    """DSPy has no class for transformers: the engine that its users write, one `generate` at a time."""
    dspy, lm15, transformers = _import("dspy"), _import("dspy").lm15, _import("transformers")

    class TransformersEngine:
        def __init__(self) -> None:
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(model)
            self.model = transformers.AutoModelForCausalLM.from_pretrained(model)
            self.lock = threading.Lock()

        def complete(self, request: Any) -> Any:
            messages = [{"role": m.role, "content": m.text} for m in request.messages]
            if request.system:
                messages.insert(0, {"role": "system", "content": str(request.system)})
            given = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            with self.lock:
                output = self.model.generate(**given, max_new_tokens=request.config.max_tokens, do_sample=False)
            new = output[0, given["input_ids"].shape[1] :]
            text = self.tokenizer.decode(new, skip_special_tokens=True)
            usage = lm15.Usage(input_tokens=given["input_ids"].shape[1], output_tokens=len(new))
            return lm15.Response(None, request.model, lm15.Message.assistant(text), "stop", usage)

    return dspy.LM(
        "local/transformers", engine=TransformersEngine(), cache=False, max_tokens=max_tokens, temperature=0.0
    )


def known_or_raise(constructors: Mapping[str, Constructor], name: str, pipeline: str, framework: str | None) -> None:
    """ConfigError, listing the known engines, unless `name` is one of them."""
    if name in constructors:
        return
    known = ", ".join(constructors) or "none"
    hint = (
        ""
        if framework
        else "; define a function of that name, or say framework = 'langchain', 'dspy', 'llama_index' or 'guidance'"
    )
    raise ConfigError(f"pipeline {pipeline!r} has no engine {name!r}; known: {known}{hint}")
