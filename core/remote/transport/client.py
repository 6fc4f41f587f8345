"""Client: requests to one endpoint, with its limits, deadlines and retries in one place."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

from graftlm.core.errors import ConfigError, GraftError, RemoteError, RequestTimeout
from graftlm.core.remote.config import Budget
from graftlm.core.remote.ledger.usage import Count, RemoteUsage
from graftlm.core.remote.transport.connections import Connections
from graftlm.core.remote.transport.failures import Failure, failure_of, no_answer

if TYPE_CHECKING:
    import openai

    from graftlm.core.remote.config import EndpointConfig

T = TypeVar("T")

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 8.0
_JITTER = 0.25  # share of a wait, added at random, so that clients do not retry together
_NO_BUDGET = Budget()
_CALL = RemoteUsage(api_calls=1)


class Client:
    """The HTTP client of one endpoint; used on the loop of endpoints only.

    spent  the total cost of all requests so far.

    The SDK's own retries are off: repeated requests are counted, kept within the budget, and end with the deadline.
    """

    def __init__(self, config: EndpointConfig) -> None:
        self.config = config
        self.spent = RemoteUsage()
        self.closed: BaseException | None = None
        self._slots = asyncio.Semaphore(config.max_in_flight)
        self._counting = threading.Lock()
        self._answered = False
        self._connections = Connections(config)

    def open(self) -> None:
        """Prepare the SDK, on any thread; raise ConfigError if it is not installed."""
        self._connections.open()

    async def post(
        self,
        path: str,
        body: Mapping[str, Any],
        count: Count,
        deadline_s: float | None = None,
        *,
        counted: RemoteUsage = _CALL,
    ) -> Mapping[str, Any]:
        """Send a body and return the response's body.

        deadline_s  a time of `time.monotonic()`, for all attempts.
        counted     usage of the first attempt; further attempts are retries.
        """

        def attempt(sdk: openai.AsyncOpenAI) -> Awaitable[object]:
            return sdk.post(path, cast_to=object, body=body)

        with _Slot(self) as slot:
            answer = await self._retrying(attempt, slot, counted, count, deadline_s)
        if not isinstance(answer, Mapping):
            raise no_answer(self.config, "with a page, not with JSON", answer)
        return answer

    async def stream(
        self,
        path: str,
        body: Mapping[str, Any],
        count: Count,
        deadline_s: float | None = None,
        *,
        counted: RemoteUsage = _CALL,
    ) -> AsyncGenerator[Mapping[str, Any]]:
        """Send a body and yield the pieces of the answer. Closing the iterator closes the connection.

        Nothing is repeated after the first piece. An endpoint that does not stream sends the whole body as one piece.
        """
        import openai

        async def attempt(sdk: openai.AsyncOpenAI) -> tuple[openai.AsyncStream[object], object]:
            stream = await sdk.post(path, cast_to=object, body=body, stream=True, stream_cls=openai.AsyncStream[object])
            try:
                if "event-stream" in (stream.response.headers.get("content-type") or "event-stream"):
                    return stream, await anext(stream, None)
                return stream, _json_or_text(await stream.response.aread())
            except BaseException:
                await stream.close()
                raise

        with _Slot(self) as slot:
            stream, piece = await self._retrying(attempt, slot, counted, count, deadline_s)
            end_s = min(time.monotonic() + self.config.timeout, deadline_s or float("inf"))
            try:
                while piece is not None:
                    if not isinstance(piece, Mapping) or piece.get("error"):
                        raise no_answer(self.config, "a stream with what is no object", piece)
                    yield piece
                    piece = await self._next(stream, end_s, deadline_s)
            finally:
                await stream.close()

    def count(self, count: Count, usage: RemoteUsage) -> None:
        """Count the cost of an answer, in the total and for the caller. Any thread may call this."""
        with self._counting:
            self.spent += usage
        count(usage)

    async def close(self, reason: BaseException) -> None:
        """Close the connections; later requests raise `reason`."""
        self.closed = reason
        await self._connections.close()

    # -- attempts ----------------------------------------------------------------------------------------------

    def _check_budget(self) -> None:
        """Raise the error that forbids an attempt: closed, or over budget."""
        budget, spent = self.config.budget, self.spent
        for name, limit, value in (
            ("calls", budget.calls, spent.api_calls + spent.retries + spent.probe_calls),
            ("tokens", budget.tokens, spent.total_tokens),
            ("cost", budget.cost, spent.cost),
        ):
            if limit is not None and value is None:
                raise ConfigError(
                    f"the budget limits the cost to {limit:g}, and the price of model {self.config.model!r} is "
                    "unknown; give prices={'input': ..., 'output': ...} per million tokens"
                )
            if limit is not None and value >= limit:
                where = self.config.base_url
                raise RemoteError(f"the budget of {where} is spent: {value:g} of {limit:g} {name}; raise budget=")

    async def _next(
        self, stream: openai.AsyncStream[object], end_s: float, deadline_s: float | None
    ) -> Mapping[str, Any] | None:
        try:
            async with asyncio.timeout(max(0.0, end_s - time.monotonic())):
                return cast("Mapping[str, Any] | None", await anext(stream, None))
        except GraftError:
            raise
        except Exception as error:
            failure = failure_of(error, self.config, begun=True)
        if failure.kind == "timeout" and _passed(deadline_s):
            raise _too_late(self.config)
        raise failure.error

    async def _retrying(
        self,
        attempt: Callable[[openai.AsyncOpenAI], Awaitable[T]],
        slot: _Slot,
        counted: RemoteUsage,
        count: Count,
        deadline_s: float | None,
    ) -> T:
        """Attempt, in `slot`, until success or a permanent failure. The first attempt is counted as `counted`.

        Raises RemoteError, or RequestTimeout at the deadline.
        """
        num_retries = num_timeouts = num_stale = 0
        while True:
            sdk = await slot.take(deadline_s)
            answered = self._answered
            left_s = float("inf") if deadline_s is None else deadline_s - time.monotonic()
            if self.config.budget != _NO_BUDGET:
                self._check_budget()
            self.count(count, counted)
            counted = RemoteUsage(retries=1)
            try:
                async with asyncio.timeout(max(0.0, min(left_s, self.config.timeout))):
                    result = await attempt(sdk)
                self._answered = True
                return result
            except Exception as error:
                failure = failure_of(error, self.config)
            # Raised outside the handler: the SDK's exception, which contains the key, must not be its context.
            if _passed(deadline_s):
                raise _too_late(self.config)
            if failure.kind == "stale" and answered and num_stale == 0:
                num_stale += 1
            elif failure.kind == "timeout" and num_timeouts < self.config.retry_timeouts:
                num_timeouts += 1
            elif failure.again and failure.kind != "timeout" and num_retries < self.config.max_retries:
                await self._wait(failure, slot, num_retries, deadline_s)
                num_retries += 1
            else:
                raise failure.error

    async def _wait(self, failure: Failure, slot: _Slot, num_retries: int, deadline_s: float | None) -> None:
        """Wait before the next attempt, without a slot."""
        wait_s = failure.wait_s
        if wait_s is None:
            wait_s = min(_FIRST_WAIT_S * 2**num_retries, _LONGEST_WAIT_S)
        wait_s *= 1 + _JITTER * random.random()
        if deadline_s is not None and time.monotonic() + wait_s >= deadline_s:
            raise failure.error  # the retry would miss the deadline
        slot.release()
        await asyncio.sleep(wait_s)


class _Slot:
    """One of the `max_in_flight` slots for concurrent requests, released at the end of a `with` block."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._sdk: openai.AsyncOpenAI | None = None

    async def take(self, deadline_s: float | None) -> openai.AsyncOpenAI:
        """Wait for the slot unless it is held; return its SDK client."""
        client = self._client
        if self._sdk is None:
            if not client._slots.locked():
                await client._slots.acquire()
            else:
                try:
                    async with asyncio.timeout(None if deadline_s is None else deadline_s - time.monotonic()):
                        await client._slots.acquire()
                except TimeoutError:
                    raise _too_late(client.config) from None
            try:
                if client.closed is not None:
                    raise client.closed
                self._sdk = client._connections.take()
            except BaseException:
                client._slots.release()
                raise
        return self._sdk

    def release(self) -> None:
        if self._sdk is not None:
            self._client._connections.give_back(self._sdk)
            self._sdk = None
            self._client._slots.release()

    def __enter__(self) -> _Slot:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _passed(deadline_s: float | None) -> bool:
    return deadline_s is not None and time.monotonic() >= deadline_s


def _json_or_text(data: bytes) -> object:
    text = data.decode(errors="replace")
    try:
        return json.loads(text)
    except ValueError:
        return text


def _too_late(config: EndpointConfig) -> RequestTimeout:
    return RequestTimeout(f"{config.base_url} did not answer within the request's timeout; raise it")
