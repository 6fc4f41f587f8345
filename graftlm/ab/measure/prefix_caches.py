"""Prefix caches of engines in this process, emptied between rounds: each round sends the same prompts."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from typing import Any, TypeVar

T = TypeVar("T")


def forget() -> int:
    """Empty the prefix caches of engines in this process, except GraftLM's runtimes; return the number of caches.

    An engine that is garbage already may be among them.
    """
    kinds = {
        empty: kind for (module, name), empty in _EMPTY.items()
        if (kind := getattr(sys.modules.get(module), name, None)) is not None
    }  # fmt: skip
    engines = _instances(_with_subclasses(kinds.values()))
    return sum(empty(one) for empty, kind in kinds.items() for one in engines if issubclass(type(one), kind))


def alive(kind: type[T]) -> list[T]:
    """Return every object of `kind` in the process. A full collection, which is slow, runs only if there is one."""
    kinds = _with_subclasses([kind])
    if not _instances(kinds):
        return []
    gc.collect()
    return _instances(kinds)


def _instances(kinds: set[type]) -> list[Any]:
    """Return the objects of exactly these types. Of 400,000 objects usually none is one: that is one pass in C."""
    things = gc.get_objects()
    return [] if kinds.isdisjoint(map(type, things)) else [thing for thing in things if type(thing) in kinds]


def _with_subclasses(kinds: Iterable[type]) -> set[type]:
    found: set[type] = set()
    more = list(kinds)
    while more:
        kind = more.pop()
        if kind not in found:
            found.add(kind)
            more += type.__subclasses__(kind)
    return found


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
