"""GraftLM's own programs: the same program on other engines, through the engine hook."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from graftlm.ab.classes.client import Constructor, key, load, served

ENGINES = {
    "hf": "graftlm.ab.classes.plain_engine:build_plain",
    "hf-batching": "graftlm.ab.classes.batching_engine:build_batching",
    "llama-cpp": "graftlm.ab.classes.llama_cpp_engine:build_llama_cpp",
}


def engines(max_tokens: int) -> Mapping[str, Constructor]:
    def openai(model: str, url: str) -> Any:
        return load("graftlm.core.runtime").Runtime(model, base_url=url, api_key=key())

    return {
        **{name: partial(_on_hook, name) for name in ENGINES},
        "graftlm": lambda model: load("graftlm.core.runtime").Runtime(model),
        "openai": openai,
        **served(openai, ("vllm", "sglang")),
    }


def on_runtime(runtime: Any, max_tokens: int) -> Any:
    return runtime


def _on_hook(name: str, model: str) -> Any:
    registry = load("graftlm.plugins.manager").load()
    if f"ab-{name}" not in registry.engines:
        registry.add("graftlm-ab", _Engines())
    return load("graftlm.core.runtime").Runtime(model, engine=f"ab-{name}")


class _Engines:
    """A plugin that lives as long as the comparison's process."""

    def __init__(self) -> None:
        from graftlm.plugins.hookspecs import Register, hookimpl

        def graftlm_register_engines(register: Register) -> None:
            for name, factory in ENGINES.items():
                register(f"ab-{name}", factory)

        self.graftlm_register_engines = hookimpl(graftlm_register_engines)
