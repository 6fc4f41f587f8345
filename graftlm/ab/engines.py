"""Engines by name: each framework's own class for an engine, so that a pipeline file needs no constructor lines."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Mapping
from functools import partial
from typing import Any

from graftlm.ab.classes.client import Constructor, running
from graftlm.core.errors import ConfigError
from graftlm.plugins.manager import load

MAX_TOKENS = 256
"""Generated tokens per call at most, the same for every engine; a pipeline file may set its own `max_tokens`."""

_ROOTS = {
    "langchain": "langchain",
    "langchain_core": "langchain",
    "langchain_openai": "langchain",
    "langchain_anthropic": "langchain",
    "langchain_ollama": "langchain",
    "langchain_huggingface": "langchain",
    "langchain_community": "langchain",
    "langgraph": "langchain",
    "dspy": "dspy",
    "llama_index": "llama_index",
    "guidance": "guidance",
    "graftlm": "native",
}
FRAMEWORKS = tuple(sorted(set(_ROOTS.values())))
_PIP_NAMES = {
    "fastapi": "'transformers[serving]'",
    "llama_cpp": "'llama-cpp-python[server]'",
    "optimum": "'optimum[openvino]'",
    "llama_index": "llama-index-core",
}


def framework_of_package(name: str) -> str | None:
    """The framework that a module or package belongs to; None for any other."""
    return _ROOTS.get(name.partition(".")[0])


def framework_of(source: str) -> str | None:
    """The framework that a pipeline's module-level imports name first; "native" for GraftLM's own programs."""
    for node in ast.parse(source).body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            if (found := framework_of_package(name)) is not None:
                return found
    return None


def remedy(error: BaseException) -> str:
    """What helps against an engine's error, where that is known; else empty."""
    if isinstance(error, NotImplementedError | AttributeError) and "async" in str(error).lower():
        return "the stock class has no asynchronous calls; compare with --engines hf-batching,graftlm"
    if isinstance(error, NotImplementedError):
        return "the stock class of this engine cannot do what the pipeline asks; name another engine, as openai:URL"
    return pip_command(error)


def pip_command(error: BaseException) -> str:
    """The command that installs the package whose absence `error`, or what led to it, reports; empty for any other."""
    cause = error.__cause__ or error.__context__
    if isinstance(error, ImportError) and not error.name and isinstance(cause, ImportError):
        error = cause  # transformers' lazy modules raise an error of their own, which names no package
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return ""
    root, *parts = error.name.split(".")
    if root == "llama_index" and len(parts) > 1:  # each integration is a package: llama_index.llms.openai
        return f"pip install {'-'.join([root, *parts[:2]]).replace('_', '-')}"
    return f"pip install {_PIP_NAMES.get(root) or root.replace('_', '-')}"


def named_engines(framework: str | None, max_tokens: int) -> Mapping[str, Constructor]:
    """The engines that a framework's pipeline can use without constructors of its own. All of them are greedy.

    Each takes the model, as a folder or a Hugging Face id; `openai` takes the base URL as well, as URL#NAME where the
    endpoint knows the model by another name. An engine that a plugin
    offers by GraftLM's hook is known by its name too, behind GraftLM's class for the framework.
    """
    if framework is None:
        return {}
    classes = importlib.import_module(f"graftlm.ab.classes.{framework}")
    known: dict[str, Constructor] = dict(classes.engines(max_tokens))
    if "openai" in known:
        known["openai"] = partial(_at_url, known["openai"])
    for name in load().engines:
        if name not in {"local", "scripted"} | known.keys():
            known[name] = partial(_of_plugin, classes.on_runtime, name, max_tokens)
    return known


def _at_url(client: Constructor, model: str, url: str) -> Any:
    at, name = running(url, model)
    return client(name, at)


def _of_plugin(on_runtime: Constructor, name: str, max_tokens: int, model: str) -> Any:
    from graftlm.core.runtime import Runtime

    return on_runtime(Runtime(model, engine=name), max_tokens)


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
