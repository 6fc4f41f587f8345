"""Guidance's classes. It sets the tokens of each `gen` itself, so `max_tokens` is not used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graftlm.ab.classes.client import Constructor, key, load, served
from graftlm.ab.classes.server import gguf


def engines(max_tokens: int) -> Mapping[str, Constructor]:
    def openai(model: str, url: str) -> Any:
        return load("guidance").models.OpenAI(model, base_url=url, api_key=key(), echo=False)

    def own_transformers(model: str) -> Any:
        mend_crop()
        return load("guidance").models.Transformers(model, echo=False, enable_monitoring=False)

    def llama_cpp(model: str, own: str = "") -> Any:
        return load("guidance").models.LlamaCpp(gguf(own or model), echo=False, n_ctx=0, enable_monitoring=False)

    return {
        "hf": own_transformers,
        "guidance": own_transformers,
        "graftlm": lambda model: load("graftlm.adapters.guidance").GraftModel(model, echo=False),
        "openai": openai,
        **served(openai),
        "llama-cpp": llama_cpp,
    }


def on_runtime(runtime: Any, max_tokens: int) -> Any:
    return load("graftlm.adapters.guidance").GraftModel(runtime=runtime, echo=False)


def mend_crop() -> None:
    """Let Guidance 0.3 run on current transformers, whose caches no longer crop to a length.

    `crop(n)` with n above 0 used to keep n tokens and now raises; below 0 it still cuts |n| tokens off.
    """
    cache = load("transformers").Cache
    crop = cache.crop
    if getattr(crop, "mended", False):
        return

    def crop_to(self: Any, length: int) -> None:
        surplus = self.get_seq_length() - length if length >= 0 else -length
        if surplus:
            crop(self, -surplus)

    crop_to.mended = True  # type: ignore[attr-defined]
    cache.crop = crop_to
