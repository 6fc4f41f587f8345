"""Endpoint: one model behind an OpenAI-compatible API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from graftlm.core.chat.messages import to_messages
from graftlm.core.config import EngineConfig, SamplingParams
from graftlm.core.errors import RemoteError
from graftlm.core.remote.capabilities.capabilities import Capabilities, MaxTokensField
from graftlm.core.remote.capabilities.probes import Probes
from graftlm.core.remote.config import EndpointConfig
from graftlm.core.remote.ledger.prices import Prices
from graftlm.core.remote.ledger.usage import Count, RemoteUsage
from graftlm.core.remote.transport import loop
from graftlm.core.remote.transport.answer import Answer, StreamedAnswers, read_answers, read_usage
from graftlm.core.remote.transport.client import Client
from graftlm.core.remote.transport.prompt import RemotePrompt
from graftlm.core.remote.transport.request_body import COMPLETIONS, request_body

if TYPE_CHECKING:
    from graftlm.core.text.tokenizer import Tokenizer

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

    def __init__(self, config: EndpointConfig, tokenizer: Any = None) -> None:
        self.config = config
        self.tokenizer: Tokenizer | None = None  # if one was given, from `open` on
        self._given_tokenizer = tokenizer
        self.capabilities = Capabilities.of(config.capabilities, config.host)
        self._client = Client(config)
        self._prices = Prices(config)
        self.probes = Probes(self)
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def spent(self) -> RemoteUsage:
        """What all calls have cost so far."""
        return self._client.spent

    @property
    def closed(self) -> BaseException | None:
        """Why the endpoint is closed, if it is."""
        return self._client.closed

    def num_tokens_of(self, text: str) -> int | None:
        """How many tokens a text has, if the tokenizer was given."""
        return None if self.tokenizer is None else len(self.tokenizer.encode_continuation(text))

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop. Cancelling the future closes its connections; so does `close`."""
        return loop.run(self._guarded(coroutine))

    def open(self) -> None:
        """Get ready for requests; raises ConfigError if the SDK is not installed."""
        if self.tokenizer is None and self._given_tokenizer is not None:
            from graftlm.core.model.load import load_tokenizer

            self.tokenizer = load_tokenizer(self.config.model, self._given_tokenizer, EngineConfig())
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

    async def ask_raw(
        self,
        prompts: Sequence[RemotePrompt],
        sampling: SamplingParams,
        count: Count,
        deadline_s: float | None = None,
        *,
        extra: Mapping[str, Any],
    ) -> list[Mapping[str, Any]]:
        """The bodies of the answers to several prompts, asked at the same time."""

        async def one(prompt: RemotePrompt) -> Mapping[str, Any]:
            path, body = self._body(prompt, sampling, None, extra)
            found = await self._client.post(path, body, count, deadline_s)
            await self._count_cost(found, [], prompt, count)
            return found

        return await _all(one(prompt) for prompt in prompts)

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

    async def probe(self, path: str, body: Mapping[str, Any], prompt: RemotePrompt, count: Count) -> Mapping[str, Any]:
        """Send a probe; its tokens are counted, but not as a call for an answer."""
        found = await self._client.post(path, body, count, probe=True)
        await self._count_cost(found, [], prompt, count)
        return found

    async def extend(self, prompt: RemotePrompt, count: Count) -> RemotePrompt:
        """The prompt in the form in which the endpoint goes on with an open turn; raises RemoteError if it does not."""
        if prompt.messages is None or not prompt.text:
            return prompt
        manner = await self.probes.continue_turn(count)
        if manner == "none":
            raise RemoteError(
                f"{self.config.base_url} does not go on with a turn of the assistant that is given in part; "
                "begin the turn with the gen, or set capabilities={'continue_turn': ...} if it does"
            )
        if manner != "template":
            return prompt
        assert self.tokenizer is not None
        rendered = self.tokenizer.render(to_messages(prompt.messages), add_generation_prompt=True)
        return RemotePrompt(rendered + prompt.text)

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
        asked = (self.ask(prompt, single, count, deadline_s, stops=stops, extra=extra) for single in singles)
        return [answers[0] for answers in await _all(asked)]

    def _learns_from(self, error: RemoteError, body: Mapping[str, Any]) -> bool:
        """Whether a refusal says which of two names the limit of tokens has here; remembered."""
        said = str(error)
        names: tuple[MaxTokensField, ...] = get_args(MaxTokensField)
        for name, other in zip(names, reversed(names), strict=True):
            if error.status in (400, 422) and name in body and "messages" in body and f"'{name}'" in said:
                self.capabilities = replace(self.capabilities, max_tokens_field=other)
                return True
        return False


async def _all(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all, in order, run at the same time; the first failure ends the others and is raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


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
