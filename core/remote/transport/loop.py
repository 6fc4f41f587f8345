"""The one thread with the one event loop on which all requests to endpoints run."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def remote_loop() -> asyncio.AbstractEventLoop:
    """The loop; its thread is started with the first use."""
    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="graftlm remote", daemon=True).start()
        return _loop


def run(coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    """Run a coroutine there. Cancelling the future cancels the coroutine, which closes its connection."""
    return asyncio.run_coroutine_threadsafe(coroutine, remote_loop())


def call_soon(function: Callable[..., object], *args: Any) -> None:
    """Call a function there, soon."""
    remote_loop().call_soon_threadsafe(function, *args)


def _forget() -> None:
    """In a forked child the thread does not run; start over."""
    global _loop, _lock
    _loop, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
