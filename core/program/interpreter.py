"""Interpreter: one thread that executes the expressions of all programs and branches of the process."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from graftlm.core.errors import EngineError
from graftlm.core.request import Completion, Request

if TYPE_CHECKING:
    from graftlm.core.text.tokenizer import Tokenizer

Step = Callable[[], None]
"""A short piece of work that never blocks and never raises."""

log = logging.getLogger("graftlm.programs")

_MAX_REQUESTS = 512
"""Maximum requests of a submission, so that the engine can start before a long burst ends."""


class Backend(Protocol):
    """The part of a runtime that programs use."""

    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def model_name(self) -> str: ...
    def submit_many(self, requests: Sequence[Request]) -> list[Future[Completion]]: ...
    def warm(self, prefix: Any) -> Any: ...
    def check_may_wait(self, name: str) -> None: ...


@dataclass(frozen=True)
class Call:
    """One model call: requests that are submitted together.

    submitted  is called with their futures and returns one future for the call.
    on_done    is called with that future when it is done, on the interpreter's thread.
    """

    backend: Backend
    requests: Sequence[Request]
    submitted: Callable[[list[Future[Completion]]], Future[Any]]
    on_done: Callable[[Future[Any]], None]


class Interpreter:
    """A queue of steps that run one at a time. The model calls of all due steps become one submission."""

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
        """Submit a model call together with the calls of other due steps. Only steps may call this."""
        self._calls.append(call)
        self._num_requests += len(call.requests)
        if self._num_requests >= _MAX_REQUESTS:
            self._submit_all()

    def call_all(self, calls: Sequence[Call]) -> None:
        """Submit each of `calls` as `call` does."""
        for call in calls:
            self.call(call)

    def answer(self, call: Call, futures: list[Future[Completion]]) -> None:
        """Resume the branch of `call` when the futures of its requests are done."""
        call.submitted(futures).add_done_callback(partial(self._end, call))

    def check_may_wait(self, name: str) -> None:
        """Raise EngineError on the interpreter's own thread, where the call `name` would deadlock."""
        if threading.current_thread() is self._thread:
            raise EngineError(
                f"{name} was called in a callback on the thread that runs all programs, so it would wait for itself; "
                "call it on another thread"
            )

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="graftlm programs", daemon=True)
                self._thread.start()

    def _serve(self) -> None:
        while True:
            step = self._steps.get()
            while True:
                try:
                    step()
                except BaseException:
                    log.exception("a step of a program failed")
                try:
                    step = self._steps.get_nowait()
                except queue.Empty:
                    break
            try:
                self._submit_all()
            except BaseException:
                log.exception("a submission of programs failed")

    def _submit_all(self) -> None:
        calls, self._calls, self._num_requests = self._calls, [], 0
        for backend in {id(call.backend): call.backend for call in calls}.values():
            self._submit(backend, [call for call in calls if call.backend is backend])

    def _submit(self, backend: Backend, calls: list[Call]) -> None:
        requests = [request for call in calls for request in call.requests]
        try:
            futures = backend.submit_many(requests)
        except BaseException as error:
            if len(calls) > 1:  # one invalid call must not end the rest: submit them individually
                for call in calls:
                    self._submit(backend, [call])
                return
            futures = [_failed(error) for _ in requests]
        first = 0
        for call in calls:
            self.answer(call, futures[first : first + len(call.requests)])
            first += len(call.requests)

    def _end(self, call: Call, future: Future[Any]) -> None:
        self.post(partial(call.on_done, future))


def _failed(error: BaseException) -> Future[Completion]:
    future: Future[Completion] = Future()
    future.set_exception(error)
    return future


_interpreter = Interpreter()


def interpreter() -> Interpreter:
    """Return the process's interpreter."""
    return _interpreter


def _forget() -> None:
    """Reset the interpreter in a forked child process, where its thread does not run."""
    global _interpreter
    _interpreter = Interpreter()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
