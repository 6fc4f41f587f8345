"""Endpoint: one model behind an OpenAI-compatible API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, TypeVar, get_args

from graftlm.core.config import SamplingParams
from graftlm.core.errors import RemoteError
from graftlm.core.remote import loop
from graftlm.core.remote.answer import Answer, StreamedAnswers, read_answers, read_usage
from graftlm.core.remote.capabilities import Capabilities, MaxTokensField
from graftlm.core.remote.client import Client
from graftlm.core.remote.config import EndpointConfig
from graftlm.core.remote.prices import Prices
from graftlm.core.remote.prompt import RemotePrompt
from graftlm.core.remote.usage import Count, RemoteUsage
from graftlm.core.remote.wire import COMPLETIONS, request_body

T = TypeVar("T")


@dataclass(frozen=True)
class Piece:
    """A piece of a streamed answer; the last one has all answers."""

    index: int = 0
    text: str = ""
    answers: list[Answer] | None = None


class Endpoint:
    """Asks for answers, and keeps what is known of the endpoint and what was spent.

    Coroutines run on the loop of endpoints; `start` brings them there from any thread.
    """

    def __init__(self, config: EndpointConfig) -> None:
        self.config = config
        self.capabilities = Capabilities.of(config.capabilities, config.host)
        self._client = Client(config)
        self._prices = Prices(config)
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def spent(self) -> RemoteUsage:
        """What all calls have cost so far."""
        return self._client.spent

    @property
    def closed(self) -> BaseException | None:
        """Why the endpoint is closed, if it is."""
        return self._client.closed

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop. Cancelling the future closes its connections; so does `close`."""
        return loop.run(self._guarded(coroutine))

    def open(self) -> None:
        """Get ready for requests; raises ConfigError if the SDK is not installed."""
        self._client.open()

    async def close(self, reason: BaseException) -> None:
        """End all that runs with `reason` and close the connections."""
        await self._client.close(reason)
        for task in list(self._tasks):
            task.cancel()

    async def _guarded(self, coroutine: Coroutine[Any, Any, T]) -> T:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            return await coroutine
        except asyncio.CancelledError:
            if self._client.closed is not None:
                raise self._client.closed from None
            raise
        finally:
            self._tasks.discard(task)

    # -- asking ------------------------------------------------------------------------------------------------

    async def ask(
        self,
        prompt: RemotePrompt,
        sampling: SamplingParams,
        count: Count,
        deadline_s: float | None = None,
        *,
        stops: tuple[str, ...] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> list[Answer]:
        """The `sampling.n` answers of one request, or of several where the endpoint brings one at a time."""
        if sampling.n > 1 and self.capabilities.n is False:
            return await self._ask_each(prompt, sampling, count, deadline_s, sampling.n, stops, extra)
        path, body = self._body(prompt, sampling, stops, extra)
        try:
            found = await self._client.post(path, body, count, deadline_s)
        except RemoteError as error:
            if not self._learns_from(error, body):
                raise _explained(error, path) from None
            path, body = self._body(prompt, sampling, stops, extra)
            found = await self._client.post(path, body, count, deadline_s)
        answers = await self._read(found, prompt, count)
        if sampling.n > 1:
            self.capabilities = replace(self.capabilities, n=len(answers) > 1)
            if len(answers) < sampling.n:
                missing = sampling.n - len(answers)
                answers += await self._ask_each(prompt, sampling, count, deadline_s, missing, stops, extra)
        return answers[: sampling.n]

    async def ask_stream(
        self,
        prompt: RemotePrompt,
        sampling: SamplingParams,
        count: Count,
        deadline_s: float | None = None,
        *,
        stops: tuple[str, ...] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[Piece]:
        """`ask`, piece by piece. What is left unread is estimated: an endpoint that is cut off reports nothing."""
        path, body = self._body(prompt, sampling, stops, extra, stream=True)
        streamed = StreamedAnswers(sampling.n)
        read = False
        try:
            async with aclosing(self._client.stream(path, body, count, deadline_s)) as pieces:
                async for piece in pieces:
                    for index, text in streamed.push(piece):
                        if text:
                            yield Piece(index, text)
            found = streamed.body(self.config)
            read = True
            yield Piece(answers=await self._read(found, prompt, count))
        except RemoteError as error:
            raise _explained(error, path) from None
        finally:
            if not read and streamed.begun:
                await self._count_cost(streamed.partial(), streamed.cut_off, prompt, count)

    # -- parts of a call ---------------------------------------------------------------------------------------

    def _body(
        self,
        prompt: RemotePrompt,
        sampling: SamplingParams,
        stops: tuple[str, ...] | None,
        extra: Mapping[str, Any] | None,
        *,
        stream: bool = False,
    ) -> tuple[str, dict[str, Any]]:
        more = {**(self.config.extra_body or {}), **(extra or {})}
        return request_body(
            self.config.model, prompt, sampling, self.capabilities, stops=stops, stream=stream, extra=more
        )

    async def _read(self, found: Mapping[str, Any], prompt: RemotePrompt, count: Count) -> list[Answer]:
        """The answers of a body; it is counted whatever it holds, since it was computed."""
        try:
            answers = read_answers(found, self.config)
        except RemoteError:
            await self._count_cost(found, [], prompt, count)
            raise
        await self._count_cost(found, answers, prompt, count)
        return answers

    async def _count_cost(
        self, found: Mapping[str, Any], answers: list[Answer], prompt: RemotePrompt, count: Count
    ) -> None:
        usage = read_usage(found, answers, prompt.num_bytes)
        self._client.count(count, replace(usage, cost=await self._prices.cost(usage, found)))

    async def _ask_each(
        self,
        prompt: RemotePrompt,
        sampling: SamplingParams,
        count: Count,
        deadline_s: float | None,
        num: int,
        stops: tuple[str, ...] | None,
        extra: Mapping[str, Any] | None,
    ) -> list[Answer]:
        """`num` answers by as many requests, at the same time. With a seed each has its own."""
        first = sampling.n - num
        singles = [
            replace(sampling, n=1, seed=None if sampling.seed is None else sampling.seed + first + i)
            for i in range(num)
        ]
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self.ask(prompt, single, count, deadline_s, stops=stops, extra=extra))
                for single in singles
            ]
        return [task.result()[0] for task in tasks]

    def _learns_from(self, error: RemoteError, body: Mapping[str, Any]) -> bool:
        """Whether a refusal says which of two names the limit of tokens has here; remembered."""
        said = str(error)
        names: tuple[MaxTokensField, ...] = get_args(MaxTokensField)
        for name, other in zip(names, reversed(names), strict=True):
            if error.status in (400, 422) and name in body and "messages" in body and f"'{name}'" in said:
                self.capabilities = replace(self.capabilities, max_tokens_field=other)
                return True
        return False


def _explained(error: RemoteError, path: str) -> RemoteError:
    """The error, with the remedy where an endpoint has no /completions."""
    if path != COMPLETIONS or error.status not in (404, 405):
        return error
    return RemoteError(
        f"{error}. Text is sent to /completions as it is; for an endpoint that only chats give messages "
        "([{'role': 'user', 'content': ...}], or gl.user and gl.assistant in a program)",
        status=error.status,
        code=error.code,
    )
