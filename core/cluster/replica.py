"""Replica: a complete runtime in its own process, which reports on its requests in lists of events."""

from __future__ import annotations

import asyncio
import os
import platform
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from graftlm.core.metrics import Stats
from graftlm.core.request import Chunk, Completion, Request

Key = tuple[int, int]
"""Number of a submission, and number of the attempt."""


class Event(NamedTuple):
    """An event of a request: a chunk, or its end as a completion, an error or None after a cancellation."""

    key: Key
    value: Chunk | Completion | BaseException | None


class Replica:
    """A runtime inside an actor, whose event loop runs the methods.

    options  options of the runtime
    """

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        from graftlm.core.runtime import Runtime

        self.runtime = Runtime(model, **options)
        self._loop = asyncio.get_event_loop()
        self._futures: dict[Key, Future[Completion]] = {}
        self._events: list[Event] = []
        self._lock = threading.Lock()
        self._news = asyncio.Event()

    async def load(self) -> dict[str, str]:
        """Load the model; return the facts that must be equal on all replicas, and this one's location."""
        import torch

        import graftlm

        await asyncio.to_thread(self.runtime.load)
        from graftlm.core.model.transformers_lock import importing_transformers

        with importing_transformers():
            import transformers

        versions = f"graftlm {graftlm.__version__}, torch {torch.__version__}, transformers {transformers.__version__}"
        pid = str(os.getpid())
        node = f"{platform.node()} (process {pid})"
        return {"fingerprint": self.runtime.fingerprint, "versions": versions, "node": node, "pid": pid}

    async def add(self, requests: Sequence[tuple[Key, Request]]) -> None:
        """Submit requests in one call."""
        for key, request in requests:
            request.on_chunk = partial(self._post, key) if request.stream else None
        try:
            futures = self.runtime.submit_many([request for _, request in requests])
        except Exception as error:
            for key, _ in requests:
                self._post(key, error)
            return
        for (key, _), future in zip(requests, futures, strict=True):
            self._futures[key] = future
            future.add_done_callback(partial(self._ended, key))

    async def cancel(self, keys: Sequence[Key]) -> None:
        """Cancel requests; unknown or finished ones are ignored."""
        for key in keys:
            if (future := self._futures.get(key)) is not None:
                future.cancel()

    async def events(self) -> AsyncIterator[list[Event]]:
        """Yield lists of all events since the last list, forever."""
        while True:
            await self._news.wait()
            self._news.clear()
            with self._lock:
                events, self._events = self._events, []
            if events:
                yield events

    async def stats(self) -> Stats:
        return self.runtime.stats()

    async def reset_stats(self) -> None:
        await asyncio.to_thread(self.runtime.reset_stats)

    async def clear_cache(self) -> None:
        await asyncio.to_thread(self.runtime.clear_cache)

    async def unpin(self, pin: int) -> None:
        self.runtime._thread.post(lambda engine: engine.unpin(pin))

    # -- the engine's thread -------------------------------------------------------------------------------------

    def _ended(self, key: Key, future: Future[Completion]) -> None:
        self._futures.pop(key, None)
        self._post(key, None if future.cancelled() else future.exception() or future.result())

    def _post(self, key: Key, value: Chunk | Completion | BaseException | None) -> None:
        with self._lock:
            self._events.append(Event(key, value))
            first = len(self._events) == 1
        if first:
            with suppress(RuntimeError):  # the actor is ending
                self._loop.call_soon_threadsafe(self._news.set)
