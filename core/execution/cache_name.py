"""What a model calls its own cache: transformers 5.24 has a new name, code outside of it still the old ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

CACHE_NAMES = ("cache", "past_key_values", "cache_params", "layer_past", "state")
"""`cache` in transformers from 5.24, `past_key_values` and `cache_params` before and in models' own code; `layer_past`
in layers of old families, `state` in RWKV."""


def cache_name(forward: Callable[..., Any]) -> str | None:
    """The keyword under which `forward` takes a cache, if any."""
    parameters = inspect.signature(forward).parameters
    return next((name for name in CACHE_NAMES if name in parameters), None)


def cache_in(arguments: Mapping[str, Any]) -> Any:
    """The cache among keyword arguments or the fields of an output, None if there is none.

    Of an output give `vars(output)`: read as an attribute, an old name of the cache would log a warning.
    """
    return next((arguments[name] for name in CACHE_NAMES if arguments.get(name) is not None), None)
