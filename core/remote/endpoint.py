"""Endpoint: one model behind an OpenAI-compatible API."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Coroutine, Iterable, Mapping
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from graftlm.core.chat.messages import to_messages
from graftlm.core.config import EngineConfig
from graftlm.core.errors import RemoteError
from graftlm.core.remote.capabilities.capabilities import Capabilities, learned
from graftlm.core.remote.capabilities.probes import Probes
from graftlm.core.remote.config import EndpointConfig
from graftlm.core.remote.ledger.prices import Prices
from graftlm.core.remote.ledger.usage import Count, RemoteUsage
from graftlm.core.remote.transport import loop
from graftlm.core.remote.transport.answer import Answer, StreamedAnswers, cut_before, read_answers, read_usage
from graftlm.core.remote.transport.client import Client
from graftlm.core.remote.transport.prompt import RemotePrompt
from graftlm.core.remote.transport.request_body import COMPLETIONS, Query, request_body

if TYPE_CHECKING:
    from graftlm.core.text.tokenizer import Tokenizer

T = TypeVar("T")

_NO_MODEL = re.compile(r" answered 404\b.*(?:model_not_found|\bmodel\b.*(?:does not exist|not found))", re.IGNORECASE)


@dataclass(frozen=True)
class Piece:
    """A piece of a streamed answer, with the answer so far; the last piece has all answers."""

    index: int = 0
    text: str = ""
    so_far: Answer | None = None
    answers: list[Answer] | None = None


class Endpoint:
    """The client of one endpoint: its requests, its detected capabilities and its ledger.

    Coroutines run on the loop of endpoints; `start` submits them from any thread.
    """

    def __init__(self, config: EndpointConfig, tokenizer: Any = None) -> None:
        self.config = config
        self.tokenizer: Tokenizer | None = None  # set by `open`, if the configuration has one
        self._given_tokenizer = tokenizer
        self.capabilities = Capabilities.of(config.capabilities, config.host)
        self._client = Client(config)
        self._prices = Prices(config)
        self.probes = Probes(self)
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def spent(self) -> RemoteUsage:
        """The total cost of all calls so far."""
        return self._client.spent

    def note(self, count: Count, usage: RemoteUsage) -> None:
        """Count saved and wasted tokens, in the caller's ledger and in the total. Any thread may call this."""
        self._client.count(count, usage)

    def num_tokens_of(self, text: str) -> int | None:
        """Return the number of tokens of a text; None without a tokenizer."""
        return None if self.tokenizer is None else len(self.tokenizer.encode_continuation(text))

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop. Cancelling the future closes its connections; so does `close`."""
        return loop.run(self._guarded(coroutine))

    def task(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a coroutine as a task; must be called on the loop."""
        return asyncio.get_running_loop().create_task(self._guarded(coroutine))

    def open(self) -> None:
        """Prepare for requests; raise ConfigError if the SDK is not installed."""
        if self.tokenizer is None and self._given_tokenizer is not None:
            from graftlm.core.model.description import load_tokenizer

            self.tokenizer = load_tokenizer(self.config.model, self._given_tokenizer, EngineConfig())
        self._client.open()

    async def close(self, reason: BaseException) -> None:
        """End all running calls with `reason` and close the connections."""
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

    async def ask(self, query: Query) -> list[Answer]:
        """Return the `sampling.n` answers of one request, or of several if the endpoint returns one at a time."""
        answers = await self._without_given(read_answers(await self.body(query), self.config), query)
        return await self._completed(answers, query)

    async def body(self, query: Query, *, probe: bool = False, **known: Any) -> Mapping[str, Any]:
        """Return the raw body of the response. Its tokens are counted even if it holds no answer.

        probe  counts the request as a probe;  known: capabilities that override the detected ones.
        """
        counted = RemoteUsage(probe_calls=1) if probe else RemoteUsage(api_calls=1)
        learning = _Learning(self, query, known)
        while True:
            path, sent = learning.request()
            try:
                found = await self._client.post(path, sent, query.count, query.deadline_s, counted=counted)
                break
            except RemoteError as error:
                learning.refused(error, path, sent)
            counted = RemoteUsage(retries=1)
        learning.succeeded()
        await self._count_cost(found, query)
        return found

    async def ask_stream(self, query: Query) -> AsyncGenerator[Piece]:
        """Yield the pieces of a streamed answer. The cost of a stream that is closed early is estimated."""
        if self.capabilities.returns_text and query.prompt.text:
            yield Piece(answers=await self.ask(query))  # the answer's end is unknown before the last piece
            return
        streamed = StreamedAnswers(query.sampling.n)
        counted = RemoteUsage(api_calls=1)
        learning = _Learning(self, query, {}, stream=True)
        while not streamed.begun:
            path, sent = learning.request()
            try:
                pieces = self._client.stream(path, sent, query.count, query.deadline_s, counted=counted)
                async with aclosing(pieces):
                    async for piece in pieces:
                        learning.succeeded()
                        for index, text, so_far in streamed.push(piece):
                            if text or so_far.thinking:
                                yield Piece(index, text, so_far)
                break
            except RemoteError as error:
                if streamed.begun:
                    raise
                learning.refused(error, path, sent)
            finally:
                if streamed.begun:
                    await self._count_cost(streamed.body, query)
            counted = RemoteUsage(retries=1)
        streamed.check_complete(self.config)
        answers = read_answers(streamed.body, self.config)
        for index, answer in enumerate(whole := await self._completed(answers, query)):
            if index >= len(answers):
                yield Piece(index, answer.text, answer)
        yield Piece(answers=whole)

    async def extend(self, prompt: RemotePrompt, count: Count) -> RemotePrompt:
        """Return the prompt in the form that continues an open turn; raise RemoteError if the endpoint has none."""
        if prompt.messages is None or not prompt.text:
            return prompt
        manner = await self.probes.continue_turn(count)
        if manner == "none":
            raise RemoteError(
                f"{self.config.base_url} does not continue a turn of the assistant that is given in part; "
                "begin the turn with the gen, or set capabilities={'continue_turn': ...} if it does"
            )
        if manner != "template":
            return prompt
        assert self.tokenizer is not None
        rendered = self.tokenizer.render(to_messages(prompt.messages), add_generation_prompt=True)
        return RemotePrompt(rendered + prompt.text)

    # -- parts of a call ---------------------------------------------------------------------------------------

    async def _count_cost(self, found: Mapping[str, Any], query: Query) -> None:
        usage = read_usage(found, query.prompt)
        self._client.count(query.count, replace(usage, cost=await self._prices.cost(usage, found)))

    async def _ask_each(self, query: Query, num_had: int) -> list[Answer]:
        """Return the answers from `num_had` on, by concurrent requests; a given seed is varied for each."""
        sampling = query.sampling
        singles = [
            replace(sampling, n=1, seed=None if sampling.seed is None else sampling.seed + i)
            for i in range(num_had, sampling.n)
        ]
        asked = await gather(self.ask(replace(query, sampling=single)) for single in singles)
        return [answers[0] for answers in asked]

    async def _completed(self, answers: list[Answer], query: Query) -> list[Answer]:
        """Return all requested answers: request the missing ones individually."""
        num = query.sampling.n
        if num > 1 and self.capabilities.n is None:
            self.capabilities = replace(self.capabilities, n=len(answers) > 1)
        if len(answers) < num:
            answers = answers + await self._ask_each(query, len(answers))
        return answers[:num]

    async def _without_given(self, answers: list[Answer], query: Query) -> list[Answer]:
        """Remove the given text from the beginning of answers, if the endpoint repeats it."""
        given = query.prompt.text
        if not given or self.capabilities.returns_text is False or query.extra.get("echo"):
            return answers
        if not any(answer.text.startswith(given) for answer in answers):
            return answers
        if not await self.probes.returns_text(query.prompt.messages is not None, query.count):
            return answers
        return [cut_before(a, len(given)) if a.text.startswith(given) else a for a in answers]


class _Learning:
    """The requests of one query: a refused one is repeated as the refusal demands; success stores the capability."""

    def __init__(self, endpoint: Endpoint, query: Query, known: Mapping[str, Any], *, stream: bool = False) -> None:
        self._endpoint = endpoint
        self._query = query
        self._known = known
        self._stream = stream
        self._learned: dict[str, Any] = {}

    def request(self) -> tuple[str, dict[str, Any]]:
        """Return the path and the body."""
        return request_body(self._query, self._endpoint.config, self._capabilities, stream=self._stream)

    def refused(self, error: RemoteError, path: str, sent: Mapping[str, Any]) -> None:
        """Learn from a refusal, or raise it."""
        found = learned(error, sent, self._capabilities)
        if not found or self._learned | found == self._learned:
            raise _explained(error, path) from None
        self._learned |= found
        if self.request()[1] == sent:
            raise _explained(error, path) from None  # the user's extra_body contains the field

    def succeeded(self) -> None:
        if self._learned:
            self._endpoint.capabilities = replace(self._endpoint.capabilities, **self._learned)
            self._learned = {}

    @property
    def _capabilities(self) -> Capabilities:
        if not self._known and not self._learned:
            return self._endpoint.capabilities
        return replace(self._endpoint.capabilities, **{**self._known, **self._learned})


async def gather(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently; return their results in order, or cancel the rest and raise the first failure."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _explained(error: RemoteError, path: str) -> RemoteError:
    """Add the remedy to the error of a missing path."""
    if error.status not in (404, 405) or _NO_MODEL.search(str(error)):
        return error
    if path == COMPLETIONS:
        remedy = (
            "Text is sent to /completions as it is; for an endpoint that only chats give messages "
            "([{'role': 'user', 'content': ...}], or gl.user and gl.assistant in a program)"
        )
    else:
        remedy = "Messages are sent to /chat/completions; for a model that only completes text give text"
    return RemoteError(f"{error}. {remedy}", status=error.status, code=error.code)
