"""Client: requests to one endpoint, with its limits, deadlines and retries in one place."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

from graftlm.core.errors import ConfigError, GraftError, RemoteError, RequestTimeout
from graftlm.core.remote.ledger.usage import Count, RemoteUsage
from graftlm.core.remote.transport.failures import Failure, failure_of, no_answer

if TYPE_CHECKING:
    import openai

    from graftlm.core.remote.config import EndpointConfig

T = TypeVar("T")

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 8.0
_JITTER = 0.25  # of a wait, added at random, so that clients do not come back together


class Client:
    """Sends requests to one endpoint; used on the loop of endpoints alone.

    spent  what all requests have cost so far.

    The SDK's own retries are off: repeated requests are counted, kept within the budget, and end with the deadline.
    """

    def __init__(self, config: EndpointConfig) -> None:
        self.config = config
        self.spent = RemoteUsage()
        self.closed: BaseException | None = None
        self._slots = asyncio.Semaphore(config.max_in_flight)
        self._answered = False
        self._sdk: openai.AsyncOpenAI | None = None

    def open(self) -> None:
        """Make the SDK's client, on any thread. Takes some 40 ms, and the first in a process a second for imports."""
        if self._sdk is None:
            self._sdk = _sdk_client(self.config)

    async def post(
        self,
        path: str,
        body: Mapping[str, Any],
        count: Count,
        deadline_s: float | None = None,
        *,
        probe: bool = False,
    ) -> Mapping[str, Any]:
        """Send a body and return the answer's. `deadline_s` is a time of `time.monotonic()`, for all attempts."""

        async def attempt() -> object:
            return await self._client.post(path, cast_to=object, body=body)

        with _Slot(self._slots) as slot:
            answer = await self._retrying(attempt, slot, _Calls(count, probe), deadline_s)
        if not isinstance(answer, Mapping):
            raise no_answer(self.config, "with a page, not with JSON", answer)
        return answer

    async def get(self, path: str, count: Count) -> Mapping[str, Any]:
        """Read what the endpoint says of itself; counted as a probe, never repeated."""

        async def attempt() -> object:
            return await self._client.get(path, cast_to=object)

        with _Slot(self._slots) as slot:
            answer = await self._retrying(attempt, slot, _Calls(count, probe=True), None, max_retries=0)
        if not isinstance(answer, Mapping):
            raise no_answer(self.config, "with a page, not with JSON", answer)
        return answer

    async def stream(
        self, path: str, body: Mapping[str, Any], count: Count, deadline_s: float | None = None
    ) -> AsyncGenerator[Mapping[str, Any]]:
        """Send a body and yield the pieces of the answer. Closing the iterator closes the connection.

        Nothing is repeated after the first piece.
        """
        import openai

        async def attempt() -> tuple[openai.AsyncStream[object], object]:
            stream = await self._client.post(
                path, cast_to=object, body=body, stream=True, stream_cls=openai.AsyncStream[object]
            )
            try:
                return stream, await anext(stream, None)
            except BaseException:
                await stream.close()
                raise

        with _Slot(self._slots) as slot:
            stream, piece = await self._retrying(attempt, slot, _Calls(count), deadline_s)
            end_s = min(time.monotonic() + self.config.timeout, deadline_s or float("inf"))
            try:
                while piece is not None:
                    if not isinstance(piece, Mapping):
                        raise no_answer(self.config, "with a stream of what are no objects", piece)
                    yield piece
                    piece = await self._next(stream, end_s, deadline_s)
            finally:
                await stream.close()

    def count(self, count: Count, usage: RemoteUsage) -> None:
        """Note what an answer has cost, here and with the caller."""
        self.spent += usage
        count(usage)

    async def close(self, reason: BaseException) -> None:
        """Close the connections; what is asked for later raises `reason`."""
        self.closed = reason
        sdk, self._sdk = self._sdk, None
        if sdk is not None:
            await sdk.close()

    # -- one attempt -------------------------------------------------------------------------------------------

    @property
    def _client(self) -> openai.AsyncOpenAI:
        assert self._sdk is not None, "the client was not opened"
        return self._sdk

    def _begin(self, calls: _Calls) -> None:
        """Count an attempt that is about to be sent; raises what forbids it."""
        if self.closed is not None:
            raise self.closed
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
        self.count(calls.count, calls.next())

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

    # -- several attempts --------------------------------------------------------------------------------------

    async def _retrying(
        self,
        attempt: Callable[[], Awaitable[T]],
        slot: _Slot,
        calls: _Calls,
        deadline_s: float | None,
        max_retries: int | None = None,
    ) -> T:
        """Attempt, in `slot`, until it succeeds or must not be repeated.

        Raises RemoteError, or RequestTimeout at the deadline.
        """
        max_retries = self.config.max_retries if max_retries is None else max_retries
        num_retries = num_timeouts = num_stale = 0
        while True:
            await self._take(slot, deadline_s)
            answered = self._answered
            left_s = float("inf") if deadline_s is None else deadline_s - time.monotonic()
            self._begin(calls)
            try:
                async with asyncio.timeout(max(0.0, min(left_s, self.config.timeout))):
                    result = await attempt()
                self._answered = True
                return result
            except Exception as error:
                failure = failure_of(error, self.config)
            # Raised out here, so that the SDK's exception, which knows the key, is not its context.
            if _passed(deadline_s):
                raise _too_late(self.config)
            if failure.kind == "stale" and answered and num_stale == 0:
                num_stale += 1
            elif failure.kind == "timeout" and num_timeouts < self.config.retry_timeouts:
                num_timeouts += 1
            elif failure.again and failure.kind != "timeout" and num_retries < max_retries:
                await self._wait(failure, slot, num_retries, deadline_s)
                num_retries += 1
            else:
                raise failure.error

    async def _take(self, slot: _Slot, deadline_s: float | None) -> None:
        """Wait until fewer than `max_in_flight` requests are under way."""
        try:
            async with asyncio.timeout(None if deadline_s is None else max(0.0, deadline_s - time.monotonic())):
                await slot.take()
        except TimeoutError:
            raise _too_late(self.config) from None

    async def _wait(self, failure: Failure, slot: _Slot, num_retries: int, deadline_s: float | None) -> None:
        """Wait before the next attempt, without a slot."""
        wait_s = failure.wait_s
        if wait_s is None:
            wait_s = min(_FIRST_WAIT_S * 2**num_retries, _LONGEST_WAIT_S)
        wait_s *= 1 + _JITTER * random.random()
        if deadline_s is not None and time.monotonic() + wait_s >= deadline_s:
            raise failure.error  # the answer would come too late
        slot.release()
        await asyncio.sleep(wait_s)


class _Slot:
    """One of the places for requests under way, given back at the end of a `with` block."""

    def __init__(self, slots: asyncio.Semaphore) -> None:
        self._slots = slots
        self._held = False

    async def take(self) -> None:
        if not self._held:
            await self._slots.acquire()
            self._held = True

    def release(self) -> None:
        if self._held:
            self._held = False
            self._slots.release()

    def __enter__(self) -> _Slot:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class _Calls:
    """How the attempts of one call are counted: the first as a call or a probe, further ones as retries."""

    def __init__(self, count: Count, probe: bool = False) -> None:
        self.count = count
        self._next = RemoteUsage(probe_calls=1) if probe else RemoteUsage(api_calls=1)

    def next(self) -> RemoteUsage:
        usage, self._next = self._next, RemoteUsage(retries=1)
        return usage


def _passed(deadline_s: float | None) -> bool:
    return deadline_s is not None and time.monotonic() >= deadline_s


def _too_late(config: EndpointConfig) -> RequestTimeout:
    return RequestTimeout(f"{config.base_url} did not answer within the request's timeout; raise it")


def _sdk_client(config: EndpointConfig) -> Any:
    try:
        import openai
    except ImportError as error:
        raise ConfigError("models at an endpoint need the openai package; pip install 'graftlm[remote]'") from error
    client = openai.AsyncOpenAI(
        api_key=config.api_key or "none",
        base_url=config.base_url,
        max_retries=0,
        timeout=config.timeout,
        default_headers=dict(config.headers or {}),
    )
    if not config.host.endswith("openai.com"):  # read from the environment, and meant for OpenAI alone
        client.organization = client.project = None
    return client
