"""Prefix caches of engines in this process, emptied between rounds: each round asks the same prompts."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def forget() -> int:
    """Let every engine of this process that is no runtime of GraftLM forget what it has computed; how many there were.

    GraftLM's runtimes are emptied by their own method. Engines that keep nothing between calls need nothing.
    """
    return sum(empty(one) for module, kind, empty in _KINDS for one in _alive_of(module, kind))


def alive(kind: type[T]) -> list[T]:
    """Every object of `kind` in the process."""
    gc.collect()
    return [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]


def _alive_of(module: str, kind: str) -> list[Any]:
    loaded = sys.modules.get(module)
    return alive(getattr(loaded, kind)) if loaded is not None and hasattr(loaded, kind) else []


def _guidance(engine: Any) -> bool:
    """Guidance's local engines keep the tokens of the last call, on which the next one goes on."""
    keeps = hasattr(engine, "_cached_token_ids")
    if keeps:
        engine._cached_token_ids, engine._cached_logits = [], None
    return keeps


def _llama_cpp(model: Any) -> bool:
    """llama-cpp-python goes on with the last call's tokens where the next prompt begins like them."""
    model.reset()
    return True


def _continuous_batching(cache: Any) -> bool:
    """Transformers' paged cache keeps the blocks of requests that have ended."""
    cache.evict_cached_blocks()
    return True


_KINDS: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
    ("guidance.models._engine", "Engine", _guidance),
    ("llama_cpp", "Llama", _llama_cpp),
    ("transformers.generation.continuous_batching.cache", "PagedAttentionCache", _continuous_batching),
)
"""Module and name of the class that holds a cache, and what empties it. A module that is not loaded holds none."""
