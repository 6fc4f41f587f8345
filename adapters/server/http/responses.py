"""The two forms of an answer: one JSON object, or a stream. Both cancel the requests on a disconnect."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from starlette.responses import Response

from graftlm.adapters.server.access import access_of
from graftlm.adapters.server.http.errors import ApiError, api_error
from graftlm.adapters.server.http.wire import DONE, PING, Envelope, event
from graftlm.core.errors import RequestCancelled
from graftlm.core.request import Chunk, Completion, Usage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Generator, Iterable, Sequence

    from starlette.types import Receive, Scope, Send

    from graftlm.adapters.server.access import Access
    from graftlm.adapters.server.intake import Answer, Event

    Events = deque[tuple[int, Event]]

JSON = [(b"content-type", b"application/json")]
EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Writer(Protocol):
    """Conversion of completions and chunks to the answer of one endpoint.

    headers  the headers of a stream
    ping     bytes that keep an idle stream open; may be empty
    whole    the JSON object of an answer that is not streamed
    pieces   the events of a chunk of request `number`;  ended: the events of its completion
    end      the last bytes of a stream whose requests have completed, in the order of the requests
    failed   the last bytes of a stream whose request has failed
    """

    @property
    def headers(self) -> list[tuple[bytes, bytes]]: ...
    @property
    def ping(self) -> bytes: ...
    def whole(self, completions: list[Completion]) -> dict[str, Any]: ...
    def pieces(self, number: int, chunk: Chunk) -> Iterator[bytes]: ...
    def ended(self, number: int, completion: Completion) -> Iterator[bytes]: ...
    def end(self, completions: Sequence[Completion]) -> bytes: ...
    def failed(self, error: ApiError) -> bytes: ...


class OpenAIStream:
    """The part of a writer that all streams of OpenAI's older endpoints share: server-sent events up to [DONE]."""

    headers = EVENTS
    ping = PING

    def __init__(self, envelope: Envelope) -> None:
        self._envelope = envelope

    def usages(self, completions: Sequence[Completion]) -> list[Usage]:
        """Return the token counts of a stream's requests."""
        return [one.usage for one in completions]

    def end(self, completions: Sequence[Completion]) -> bytes:
        usage = self._envelope.usage(self.usages(completions)) if self._envelope.with_usage else b""
        return usage + DONE

    def failed(self, error: ApiError) -> bytes:
        """Return the error as the last event; no [DONE] follows."""
        return event({"error": error.error})


class WholeAnswer(Response):
    """One JSON object, sent when all requests have ended."""

    def __init__(self, answer: Answer, writer: Writer, fields: Mapping[str, str]) -> None:
        self.answer, self.writer, self.fields = answer, writer, fields

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        access = access_of(scope)
        async with _while_connected(self.answer, receive):
            try:
                completions = await self.answer.completions()
            except RequestCancelled as error:
                if self.answer.withdrawn:
                    raise _withdrawn() from error
                access.note_gone()
                return
            except Exception as error:
                raise api_error(error, self.fields) from error
            access.usage = sum((one.usage for one in completions), Usage())
            body = json.dumps(self.writer.whole(completions), separators=(",", ":")).encode()
            length = (b"content-length", str(len(body)).encode())
            await send({"type": "http.response.start", "status": 200, "headers": [*JSON, length]})
            await send({"type": "http.response.body", "body": body})


class EventStream(Response):
    """A stream of events. The chunks of one step for one HTTP request are one write.

    The first event carries the status, so a request that fails before it gets an error's status. Later chunks are
    written in the callback that receives the engine's events, without waking this response's task; the task writes the
    end, and the chunks that a slow client has delayed.
    """

    def __init__(self, answer: Answer, writer: Writer, fields: Mapping[str, str]) -> None:
        self.answer, self.writer, self.fields = answer, writer, fields
        self._completions: dict[int, Completion] = {}
        self._begun = False
        self._blocked: _Rest | None = None
        self._error: Exception | None = None
        self._bare_send: Send | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._bare_send, access = scope.get("graftlm.bare_send"), access_of(scope)
        async with _while_connected(self.answer, receive):
            while len(self._completions) < len(self.answer.requests):
                events = await self.answer.events()
                self.answer.write_at_once = None  # until this task's own write is complete
                if self._error is not None:
                    raise self._error
                if self._blocked is not None:
                    await self._blocked
                    self._blocked = None
                data, failure = self._read(events)
                if data:
                    await self._send(data, send)
                if failure is not None:
                    access.num_tokens = self.answer.num_tokens
                    await self._fail(failure, access, send)
                    return
                if self._begun and self._bare_send is not None:
                    self.answer.write_at_once = self._write_at_once
            done = [self._completions[number] for number in range(len(self.answer.requests))]
            access.usage = sum((one.usage for one in done), Usage())
            await self._send(self.writer.end(done), send, more=False)

    def _read(self, events: Events) -> tuple[bytes, BaseException | None]:
        """Return the bytes of the events, and the error that ended the request."""
        if len(events) == 1 and isinstance(events[0][1], Chunk):
            return b"".join(self.writer.pieces(*events[0])), None  # type: ignore[arg-type]
        chunks: dict[int, list[Chunk]] = {}
        ended: list[bytes] = []
        pinged = False
        for number, item in events:
            if isinstance(item, Chunk):
                chunks.setdefault(number, []).append(item)
            elif isinstance(item, Completion):
                self._completions[number] = item
                ended.extend(self.writer.ended(number, item))
            elif item is None:
                pinged = True
            else:
                return b"", item
        pieces = self.writer.pieces
        written = [
            piece for number, items in chunks.items() for chunk in merged(items) for piece in pieces(number, chunk)
        ]
        return b"".join([*written, *ended]) or (self.writer.ping if pinged else b""), None

    def _write_at_once(self, events: Events) -> bool:
        """Send chunks only; return False to leave the events to the task. Called on the loop, outside of any task."""
        if self._blocked is not None or any(item.__class__ is not Chunk for _, item in events):
            return False
        assert self._bare_send is not None
        try:
            data, _ = self._read(events)
            if data:
                sending: Any = self._bare_send({"type": "http.response.body", "body": data, "more_body": True})
                self._blocked = _Rest(sending, sending.send(None))
                self.answer.wake()
        except StopIteration:
            pass  # the write is complete
        except Exception as error:  # ends this stream alone: the loop continues with other answers
            self._error = error
            self.answer.wake()
        return True

    async def _send(self, data: bytes, send: Send, *, more: bool = True) -> None:
        if not self._begun:
            self._begun = True
            await send({"type": "http.response.start", "status": 200, "headers": self.writer.headers})
        await send({"type": "http.response.body", "body": data, "more_body": more})

    async def _fail(self, error: BaseException, access: Access, send: Send) -> None:
        """Send an error as the last event; raise it if the headers are not sent yet."""
        self.answer.cancel()
        if isinstance(error, RequestCancelled) and not self.answer.withdrawn:
            access.note_gone()
            return
        failure = _withdrawn() if isinstance(error, RequestCancelled) else api_error(error, self.fields)
        if not self._begun:
            raise failure from error
        access.reason = failure.error["code"] or failure.error["type"] or ""
        await self._send(self.writer.failed(failure), send, more=False)


def _withdrawn() -> ApiError:
    return ApiError(
        409, "the operator of the server has cancelled the request", kind="server_error", code="cancelled_here"
    )


class _Rest:
    """The rest of a coroutine that was started outside of a task and waits for a future."""

    def __init__(self, coroutine: Any, waits_for: Any) -> None:
        self._coroutine = coroutine
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, Any, None]:
        yield self._waits_for
        yield from self._coroutine.__await__()


@asynccontextmanager
async def _while_connected(answer: Answer, receive: Receive) -> AsyncIterator[None]:
    """Cancel the requests when the client disconnects, or when the block ends for any other reason."""

    def gone(task: asyncio.Task[Any]) -> None:
        if not task.cancelled():
            answer.cancel()

    watch = asyncio.ensure_future(receive())
    watch.add_done_callback(gone)  # after the body, only http.disconnect can arrive
    try:
        yield
    finally:
        watch.cancel()
        if answer.num_open:
            answer.cancel()


def merged(chunks: list[Chunk]) -> Iterable[Chunk]:
    """Join chunks of one request that arrived together, by index: one message instead of several."""
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
