"""The one thread that moves every program of the process forward, however many branches they have."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from graftlm.core.request import Completion, Request

if TYPE_CHECKING:
    from graftlm.core.text.tokenizer import Tokenizer

Step = Callable[[], None]
"""A short piece of work that never blocks and never raises."""

_MAX_REQUESTS = 512  # hand over at the latest with this many, so that the engine need not wait for a long burst


class Backend(Protocol):
    """What a program needs of a runtime."""

    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def model_name(self) -> str: ...
    def submit_many(self, requests: Sequence[Request]) -> list[Future[Completion]]: ...
    def warm(self, prefix: Any) -> Any: ...


@dataclass(frozen=True)
class Call:
    """Requests to hand over together.

    started  is given their futures and returns the one that stands for the call.
    ended    is given that one when it is done; runs on the interpreter's thread.
    """

    backend: Backend
    requests: Sequence[Request]
    started: Callable[[list[Future[Completion]]], Future[Any]]
    ended: Callable[[Future[Any]], None]


class Interpreter:
    """Runs steps one after the other, and hands over the requests of all steps that were due as one submission."""

    def __init__(self) -> None:
        self._steps: queue.SimpleQueue[Step] = queue.SimpleQueue()
        self._calls: list[Call] = []
        self._num_requests = 0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def post(self, step: Step) -> None:
        """Run `step` on the interpreter's thread. Any thread may call this."""
        self._steps.put(step)
        if self._thread is None:
            self._start()

    def call(self, call: Call) -> None:
        """Hand requests over with those of the other steps that are due. Only for steps."""
        self._calls.append(call)
        self._num_requests += len(call.requests)
        if self._num_requests >= _MAX_REQUESTS:
            self._hand_over()

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="graftlm programs", daemon=True)
                self._thread.start()

    def _serve(self) -> None:
        while True:
            step = self._steps.get()
            while True:
                step()
                try:
                    step = self._steps.get_nowait()
                except queue.Empty:
                    break
            self._hand_over()

    def _hand_over(self) -> None:
        calls, self._calls, self._num_requests = self._calls, [], 0
        for backend in {id(call.backend): call.backend for call in calls}.values():
            self._submit(backend, [call for call in calls if call.backend is backend])

    def _submit(self, backend: Backend, calls: list[Call]) -> None:
        requests = [request for call in calls for request in call.requests]
        try:
            futures = backend.submit_many(requests)
        except BaseException as error:  # a closed runtime, say: every call ends with the cause
            futures = [_failed(error) for _ in requests]
        first = 0
        for call in calls:
            future = call.started(futures[first : first + len(call.requests)])
            first += len(call.requests)
            future.add_done_callback(partial(self._end, call))

    def _end(self, call: Call, future: Future[Any]) -> None:
        self.post(partial(call.ended, future))


def _failed(error: BaseException) -> Future[Completion]:
    future: Future[Completion] = Future()
    future.set_exception(error)
    return future


_interpreter = Interpreter()


def interpreter() -> Interpreter:
    """The process's interpreter."""
    return _interpreter


def _forget() -> None:
    """In a forked child the thread does not run; start over."""
    global _interpreter
    _interpreter = Interpreter()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
