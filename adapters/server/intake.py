"""Intake: requests from the event loop to the engine, and their events back to the loop.

One thread tokenises prompts, all that have arrived meanwhile in one batch, so the loop never blocks on it. The engine's
thread appends chunks to one outbox and wakes the loop once per step, for any number of requests.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from graftlm.core.errors import RequestCancelled
from graftlm.core.request import Chunk, Completion, Request

if TYPE_CHECKING:
    from graftlm.adapters.server.metrics import Metrics
    from graftlm.core.runtime import Runtime

PING_S = 15.0
"""Seconds without an event after which a stream gets a comment, so that no proxy closes its connection."""

Event = Chunk | Completion | BaseException | None
"""A chunk; the end, as a completion or an error; None after PING_S seconds without an event."""


class Answer:
    """The events of one HTTP request's requests, in order, each with its request's number.

    `cancel` frees their KV; they then end with RequestCancelled.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = requests
        self.arrived_s = self.last_s = time.monotonic()
        self.streams = False  # True after the first chunk
        self.num_open = len(requests)
        self.num_sequences = sum(request.sampling.n for request in requests)
        self.generated = [0] * len(requests)  # tokens of each request's chunks so far
        self.cancelled = False
        self.withdrawn = False  # cancelled by the operator, whose client is told
        self.write_at_once: Callable[[deque[tuple[int, Event]]], bool] | None = None
        self._events: deque[tuple[int, Event]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._futures: list[Future[Completion]] = []

    @property
    def num_tokens(self) -> int:
        """Generated tokens of the chunks so far."""
        return sum(self.generated)

    async def events(self) -> deque[tuple[int, Event]]:
        """Return all events since the last call; waits for one, or for `wake`."""
        if not self._events:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        events, self._events = self._events, deque()
        return events

    async def completions(self) -> list[Completion]:
        """Return the completions of all requests, in order. The first error is raised and cancels the others."""
        done: dict[int, Completion] = {}
        while len(done) < len(self.requests):
            for number, event in await self.events():
                if isinstance(event, Completion):
                    done[number] = event
                elif isinstance(event, BaseException):
                    self.cancel()
                    raise event
        return [done[number] for number in range(len(self.requests))]

    def cancel(self) -> None:
        self.cancelled = True
        for future in self._futures:
            future.cancel()

    def take(self, number: int, event: Event) -> None:
        """Append an event; the caller then calls `pass_on`. Runs on the loop."""
        self._events.append((number, event))

    def pass_on(self) -> None:
        """Pass the events to `write_at_once`, or wake the waiting task. Runs on the loop."""
        if self.write_at_once is not None and self.write_at_once(self._events):
            self._events.clear()
        else:
            self.wake()

    def wake(self) -> None:
        """Wake the task that waits in `events`. Runs on the loop."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Intake:
    """The queue between a server's event loop and its runtime; constructed on the loop."""

    def __init__(self, runtime: Runtime, metrics: Metrics) -> None:
        self.runtime = runtime
        self.metrics = metrics
        self.open: set[Answer] = set()
        self.num_sequences = 0  # of the open answers
        self._loop = asyncio.get_running_loop()
        self._arrived: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
        self._outbox: deque[tuple[Answer, int, Event]] = deque()
        self._called = False
        self._pinger = self._loop.call_later(PING_S, self._ping)
        threading.Thread(target=self._run, name="graftlm intake", daemon=True).start()

    def submit(self, requests: Sequence[Request]) -> Answer:
        """Queue requests as one submission. Runs on the loop."""
        answer = Answer(requests)
        self.open.add(answer)
        self.num_sequences += answer.num_sequences
        self._arrived.put(answer)
        return answer

    def request_ids(self) -> dict[int, str]:
        """Return the HTTP request's id of each open native request. From any thread."""
        return {request.id: request.owner[1] for answer in list(self.open) for request in answer.requests}

    def cancel(self, request_id: str) -> int:
        """Cancel the open answers of an HTTP request and return their number. Runs on the loop."""
        found = [answer for answer in self.open if answer.requests[0].owner[1] == request_id]
        for answer in found:
            answer.withdrawn = True
            answer.cancel()
        return len(found)

    def close(self) -> None:
        self._pinger.cancel()
        self._arrived.put(None)

    # -- the intake's thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (answer := self._arrived.get()) is not None:
            answers = [answer]
            with suppress(queue.Empty):
                while (more := self._arrived.get_nowait()) is not None:
                    answers.append(more)
                self._arrived.put(None)
            self._hand_over(answers)

    def _hand_over(self, answers: list[Answer]) -> None:
        for answer in answers:
            if answer.cancelled:
                for number in range(len(answer.requests)):
                    self._post(answer, number, RequestCancelled("the client closed the connection"))
        answers = [answer for answer in answers if not answer.cancelled]
        for answer in answers:
            for number, request in enumerate(answer.requests):
                if request.stream:
                    request.on_chunk = partial(self._post, answer, number)
        try:
            futures = self.runtime.submit_many([request for answer in answers for request in answer.requests])
        except BaseException as error:  # Rust code raises panics as BaseException
            if len(answers) > 1:
                for answer in answers:  # submit each answer alone, so that only the invalid one fails
                    self._hand_over([answer])
                return
            for answer in answers:
                for number in range(len(answer.requests)):
                    self._post(answer, number, error)
            return
        for answer in answers:
            own, futures = futures[: len(answer.requests)], futures[len(answer.requests) :]
            answer._futures = own
            for number, future in enumerate(own):
                future.add_done_callback(partial(self._ended, answer, number))
            if answer.cancelled:
                answer.cancel()

    # -- any thread ----------------------------------------------------------------------------------------------

    def _ended(self, answer: Answer, number: int, future: Future[Completion]) -> None:
        if future.cancelled():
            self._post(answer, number, RequestCancelled("the client closed the connection"))
        else:
            self._post(answer, number, future.exception() or future.result())

    def _post(self, answer: Answer, number: int, event: Event) -> None:
        self._outbox.append((answer, number, event))
        if not self._called:
            self._called = True
            with suppress(RuntimeError):  # the loop is closed: the event has no reader
                self._loop.call_soon_threadsafe(self._deliver)

    # -- the loop ------------------------------------------------------------------------------------------------

    def _deliver(self) -> None:
        self._called = False
        now = time.monotonic()
        told: dict[Answer, None] = {}
        while self._outbox:
            answer, number, event = self._outbox.popleft()
            if isinstance(event, Chunk):
                if answer.streams:
                    self.metrics.written(now - answer.last_s)
                answer.streams = True
                answer.generated[number] += len(event.token_ids)
            else:
                answer.num_open -= 1
                if not answer.num_open:
                    self.open.discard(answer)
                    self.num_sequences -= answer.num_sequences
                if isinstance(event, Completion):
                    self.metrics.ended(answer, event, now)
                elif event is not None:
                    self.metrics.failed(answer, number, event, now)
            answer.last_s = now
            answer.take(number, event)
            told[answer] = None
        for answer in told:
            answer.pass_on()

    def _ping(self) -> None:
        self._pinger = self._loop.call_later(PING_S, self._ping)
        before = time.monotonic() - PING_S
        for answer in self.open:
            if answer.last_s < before:
                answer.take(0, None)
                answer.pass_on()
