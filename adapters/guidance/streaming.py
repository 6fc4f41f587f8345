"""Streams of model objects; closing a stream cancels its running calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from queue import Queue
from typing import Any

from graftlm.core.errors import RequestCancelled
from guidance.models import Model
from guidance.models._base._model import ModelStream, _event_queues


class Reader:
    """The consumer of a stream, as seen by the producing thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left = False
        self._cancels: list[Callable[[], object]] = []

    @contextmanager
    def cancelling(self, cancel: Callable[[], object]) -> Iterator[None]:
        """Call `cancel` if the reader closes the stream during the block. Raises RequestCancelled after a close."""
        with self._lock:
            left = self._left
            self._cancels.append(cancel)
        try:
            if left:
                cancel()
                raise RequestCancelled("the stream was left before its end")
            yield
        finally:
            with self._lock:
                self._cancels.remove(cancel)

    def leave(self) -> None:
        """Mark the stream as closed and cancel its running calls."""
        with self._lock:
            self._left, cancels = True, list(self._cancels)
        for cancel in cancels:
            cancel()


_reader: ContextVar[Reader | None] = ContextVar("graftlm_guidance_reader", default=None)


@contextmanager
def cancelled_with_reader(cancel: Callable[[], object]) -> Iterator[None]:
    """Call `cancel` if the current thread's stream is closed during the block."""
    reader = _reader.get()
    if reader is None:
        yield
        return
    with reader.cancelling(cancel):
        yield


class GraftStream(ModelStream):
    """A stream of model objects; the last one is the result, with the usage of the whole run.

    Closing its iterator cancels the running call and frees its KV.
    """

    def __add__(self, grammar: Any) -> GraftStream:
        return GraftStream(self.model, grammar if self.grammar is None else self.grammar + grammar)

    def __iter__(self) -> Iterator[Model]:
        events: Queue[Any] = Queue()
        reader, context = Reader(), copy_context()
        context.run(_event_queues.set, (*_event_queues.get(), events))
        context.run(_reader.set, reader)

        def write() -> None:
            try:
                grammar: Any = "" if self.grammar is None else self.grammar
                events.put(self.model + grammar)
            except BaseException as error:
                events.put(error)
            else:
                events.put(None)

        threading.Thread(target=context.run, args=(write,), name="graftlm guidance stream", daemon=True).start()
        try:
            while (event := events.get()) is not None:
                if isinstance(event, BaseException):
                    raise event
                yield event
        finally:
            reader.leave()
