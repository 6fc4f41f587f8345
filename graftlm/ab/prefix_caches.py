"""Prefix caches of engines in this process, emptied between rounds: each round asks the same prompts."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


def forget() -> int:
    """Let every engine of this process that is no runtime of GraftLM forget what it has computed; how many there were.

    GraftLM's runtimes are emptied by their own method. Engines that keep nothing between calls need nothing.
    """
    loaded = ((getattr(sys.modules.get(module), kind, None), empty) for module, kind, empty in _KINDS)
    kinds = [(kind, empty) for kind, empty in loaded if kind is not None]
    engines = _alive_of(kind for kind, _ in kinds)
    return sum(empty(one) for kind, empty in kinds for one in engines if issubclass(type(one), kind))


def alive(kind: type[T]) -> list[T]:
    """Every object of `kind` in the process."""
    return _alive_of([kind])


def _alive_of(kinds: Iterable[type]) -> list[Any]:
    """Objects of any of these kinds. A full collection can take a second, and is made only where there is one."""
    wanted = _with_subclasses(kinds)
    if not any(type(thing) in wanted for thing in gc.get_objects()):
        return []
    gc.collect()
    return [thing for thing in gc.get_objects() if type(thing) in wanted]


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
