"""The two ways an answer leaves: as one JSON object, or as server-sent events. Both end the request with its client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from starlette.responses import Response

from graftlm.adapters.server.http.errors import api_error
from graftlm.adapters.server.http.wire import DONE, PING, Envelope, event
from graftlm.core.errors import RequestCancelled
from graftlm.core.request import Chunk, Completion

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from starlette.types import Receive, Scope, Send

    from graftlm.adapters.server.intake import Answer

JSON = [(b"content-type", b"application/json")]
EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Writer(Protocol):
    """Turns completions and chunks into what one endpoint answers with."""

    def whole(self, completions: list[Completion]) -> dict[str, Any]: ...
    def pieces(self, number: int, chunk: Chunk) -> Iterator[bytes]: ...


class WholeAnswer(Response):
    """One JSON object, when all requests have ended."""

    def __init__(self, answer: Answer, writer: Writer, fields: frozenset[str]) -> None:
        self.answer, self.writer, self.fields = answer, writer, fields

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with _while_connected(self.answer, receive):
            try:
                completions = await self.answer.completions()
            except RequestCancelled:
                return
            except Exception as error:
                raise api_error(error, self.fields) from error
            body = json.dumps(self.writer.whole(completions), separators=(",", ":")).encode()
            length = (b"content-length", str(len(body)).encode())
            await send({"type": "http.response.start", "status": 200, "headers": [*JSON, length]})
            await send({"type": "http.response.body", "body": body})


class EventStream(Response):
    """Server-sent events. What a step wrote for one HTTP request leaves in one write.

    The status is sent with the first event, so a request that fails before it gets an error's status.
    """

    def __init__(self, answer: Answer, writer: Writer, envelope: Envelope, fields: frozenset[str]) -> None:
        self.answer, self.writer, self.envelope, self.fields = answer, writer, envelope, fields
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with _while_connected(self.answer, receive):
            completions: list[Completion] = []
            while len(completions) < len(self.answer.requests):
                chunks: dict[int, list[Chunk]] = {}
                pinged = False
                for number, item in await self.answer.events():
                    if isinstance(item, Chunk):
                        chunks.setdefault(number, []).append(item)
                    elif isinstance(item, Completion):
                        completions.append(item)
                    elif item is None:
                        pinged = True
                    else:
                        await self._fail(item, send)
                        return
                written = [
                    piece
                    for number, items in chunks.items()
                    for chunk in merged(items)
                    for piece in self.writer.pieces(number, chunk)
                ]
                if written or pinged:
                    await self._send(b"".join(written) or PING, send)
            end = [self.envelope.usage(c.usage for c in completions)] if self.envelope.with_usage else []
            await self._send(b"".join([*end, DONE]), send, more=False)

    async def _send(self, data: bytes, send: Send, *, more: bool = True) -> None:
        if not self._begun:
            self._begun = True
            await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
        await send({"type": "http.response.body", "body": data, "more_body": more})

    async def _fail(self, error: BaseException, send: Send) -> None:
        """After the headers, an error is the last event, and no [DONE] follows."""
        self.answer.cancel()
        if isinstance(error, RequestCancelled):
            return
        failure = api_error(error, self.fields)
        if not self._begun:
            raise failure from error
        await self._send(event({"error": failure.error}), send, more=False)


@asynccontextmanager
async def _while_connected(answer: Answer, receive: Receive) -> AsyncIterator[None]:
    """Cancel the requests when the client goes, or when the block ends for any other reason."""

    def gone(task: asyncio.Task[Any]) -> None:
        if not task.cancelled():
            answer.cancel()

    watch = asyncio.ensure_future(receive())
    watch.add_done_callback(gone)  # after the body there is nothing to receive but http.disconnect
    try:
        yield
    finally:
        watch.cancel()
        if answer.num_open:
            answer.cancel()


def merged(chunks: list[Chunk]) -> Iterable[Chunk]:
    """Chunks of one request that arrived together, joined by index: one message instead of several."""
    if len(chunks) == 1:
        return chunks
    by_index: dict[int, Chunk] = {}
    for chunk in chunks:
        before = by_index.get(chunk.index)
        by_index[chunk.index] = chunk if before is None else _joined(before, chunk)
    return by_index.values()


def _joined(first: Chunk, second: Chunk) -> Chunk:
    logprobs = None if first.logprobs is None else [*first.logprobs, *(second.logprobs or [])]
    ids = first.token_ids + second.token_ids
    return replace(second, text=first.text + second.text, token_ids=ids, logprobs=logprobs)
