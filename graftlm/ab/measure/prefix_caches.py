"""Prefix caches of engines in this process, emptied between rounds: each round sends the same prompts."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from typing import Any, TypeVar

T = TypeVar("T")


def forget() -> int:
    """Empty the prefix caches of engines in this process, except GraftLM's runtimes; return the number of caches."""
    kinds = {
        empty: kind for (module, name), empty in _EMPTY.items()
        if (kind := getattr(sys.modules.get(module), name, None)) is not None
    }  # fmt: skip
    engines = _alive_of(kinds.values())
    return sum(empty(one) for empty, kind in kinds.items() for one in engines if issubclass(type(one), kind))


def alive(kind: type[T]) -> list[T]:
    """Return every object of `kind` in the process."""
    return _alive_of([kind])


def _alive_of(kinds: Iterable[type]) -> list[Any]:
    """Return the objects of these kinds. A full collection can take a second: it runs only where there is one."""
    wanted: set[type] = set()
    more = list(kinds)
    while more:
        kind = more.pop()
        if kind not in wanted:
            wanted.add(kind)
            more += type.__subclasses__(kind)
    if not any(type(thing) in wanted for thing in gc.get_objects()):
        return []
    gc.collect()
    return [thing for thing in gc.get_objects() if type(thing) in wanted]


def _guidance(engine: Any) -> bool:
    """Drop the tokens of the last call, so that the next call cannot reuse their KV."""
    keeps = hasattr(engine, "_cached_token_ids")
    if keeps:
        engine._cached_token_ids, engine._cached_logits = [], None
    return keeps


def _llama_cpp(model: Any) -> bool:
    """Drop the last call's tokens, so that the next call cannot reuse their KV."""
    model.reset()
    return True


def _continuous_batching(cache: Any) -> bool:
    """Drop the blocks of requests that have ended."""
    cache.evict_cached_blocks()
    return True


_EMPTY = {
    ("guidance.models._engine", "Engine"): _guidance,
    ("llama_cpp", "Llama"): _llama_cpp,
    ("transformers.generation.continuous_batching.cache", "PagedAttentionCache"): _continuous_batching,
}
"""The function that empties a cache, by module and name of the class that holds it; unloaded modules hold none."""
