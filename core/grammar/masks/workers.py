"""The threads that compute masks, outside of Python's lock; a fork gets threads of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_pool: ThreadPoolExecutor


def count() -> int:
    """How many threads there are at most."""
    return max(1, min(8, (os.cpu_count() or 1) - 1))


def submit(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    return _pool.submit(function, *args, **kwargs)


def _start() -> None:
    global _pool
    _pool = ThreadPoolExecutor(count(), thread_name_prefix="graftlm mask")


_start()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start)
