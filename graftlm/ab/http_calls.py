"""HttpCalls: model calls of HTTP clients to OpenAI-compatible APIs, counted by the usage that the answers tell."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any
from urllib.parse import urlsplit

_PATHS = ("/completions", "/responses", "/messages")
_LM15 = ("lm15.transports", "dspy._vendor.lm15.transports")
"""DSPy's own HTTP client, by itself and as DSPy brings it."""


class HttpCalls:
    """Counts answered requests. A count is None where an answer did not tell it: then the sum is unknown.

    An answer that is still being read at `reset` belongs to no later count.

    hook  may be called again: each client library of the process is hooked once, when it is there
    span    is told when each call began, at its end
    prompt  is told the body of each request that was answered
    """

    def __init__(self, span: Callable[[float], None], prompt: Callable[[Any], None] = lambda body: None) -> None:
        self._span, self._prompt = span, prompt
        self._lock = threading.Lock()
        self._hooked: set[str] = set()
        self._usages: list[Mapping[str, int | None]] = []
        self._open: set[_Answer] = set()
        self._num_sent = 0
        self.refused: Counter[int] = Counter()
        """Requests that were answered with an error, by HTTP status."""

    def reset(self) -> None:
        with self._lock:
            self._usages, self._open, self.refused = [], set(), Counter()

    @property
    def num(self) -> int:
        with self._lock:
            return len(self._usages) + len(self._open)

    @property
    def under_way(self) -> int:
        """Requests without an answer yet, and answers since `reset` that are still being read."""
        with self._lock:
            return self._num_sent + len(self._open)

    def total(self, what: str) -> int | None:
        """The sum of `prompt`, `cached` or `completion` tokens; None if there was no call, or one did not tell."""
        with self._lock:
            values = [usage[what] for usage in self._usages] + [None] * len(self._open)
        known = [value for value in values if value is not None]
        return sum(known) if values and len(known) == len(values) else None

    def hook(self) -> None:
        """Let every HTTP client library that is loaded report its requests."""
        for name in ("httpx", "httpx2"):
            if (module := self._found(name)) is not None:
                self._hook_httpx(module)
        if (module := self._found("requests")) is not None:
            self._hook_requests(module)
        for name in _LM15:
            if (module := self._found(name)) is not None:
                self._hook_lm15(module)

    def _found(self, name: str) -> Any:
        """The module, if it is loaded and not hooked yet."""
        module = sys.modules.get(name)
        if module is None or name in self._hooked:
            return None
        self._hooked.add(name)
        return module

    @contextmanager
    def _sending(self, url: str) -> Iterator[None]:
        """A request is under way until its answer is followed."""
        counts = int(_is_call(url))
        with self._lock:
            self._num_sent += counts
        try:
            yield
        finally:
            with self._lock:
                self._num_sent -= counts

    def _begun(self, url: str, status: int, begin: float, body: Any) -> _Answer | None:
        """Follow one answer, to a request with this body; None if it is not a model's."""
        if not _is_call(url):
            return None
        if status >= 400:
            with self._lock:
                self.refused[status] += 1
            return None
        self._prompt(body)
        answer = _Answer(self._ended, begin)
        with self._lock:
            self._open.add(answer)
        return answer

    def _ended(self, answer: _Answer, body: bytes) -> None:
        usage = usage_of(body)
        with self._lock:
            if answer not in self._open:
                return
            self._open.remove(answer)
            self._usages.append(usage)
        self._span(answer.begin)

    def _hook_httpx(self, httpx: Any) -> None:
        send, asend = httpx.Client.send, httpx.AsyncClient.send

        def follow(request: Any, response: Any, begin: float) -> Any:
            body = getattr(request, "_content", None)  # not there where it is streamed
            answer = self._begun(str(request.url), response.status_code, begin, body)
            if answer is None:
                return response
            if response.is_closed:
                answer.end(response.content)
            else:  # a stream is still being read
                response.iter_bytes = answer.following(response.iter_bytes)
                response.aiter_bytes = answer.afollowing(response.aiter_bytes)
                response.close = answer.closing(response.close)
                response.aclose = answer.aclosing(response.aclose)
            return response

        @wraps(send)
        def counted(client: Any, request: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            with self._sending(str(request.url)):
                return follow(request, send(client, request, **options), begin)

        @wraps(asend)
        async def acounted(client: Any, request: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            with self._sending(str(request.url)):
                return follow(request, await asend(client, request, **options), begin)

        httpx.Client.send, httpx.AsyncClient.send = counted, acounted

    def _hook_requests(self, requests: Any) -> None:
        send = requests.Session.send

        @wraps(send)
        def counted(session: Any, request: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            with self._sending(request.url):
                response = send(session, request, **options)
                answer = self._begun(request.url, response.status_code, begin, request.body)
            if answer is not None and not options.get("stream"):
                answer.end(response.content)
            elif answer is not None:
                response.iter_content = answer.following(response.iter_content)
                response.close = answer.closing(response.close)
            return response

        requests.Session.send = counted

    def _hook_lm15(self, transports: Any) -> None:
        sync, asynchronous = transports.StdlibTransport, transports.StdlibAsyncTransport
        stream, astream = sync.stream, asynchronous._do_stream

        @wraps(stream)
        def counted(transport: Any, request: Any) -> Any:
            begin = time.perf_counter()
            with self._sending(request.url):
                response = stream(transport, request)
                answer = self._begun(request.url, response.status, begin, request.body)
            if answer is not None:
                response._chunks = answer.read(response._chunks)
            return response

        @wraps(astream)
        async def acounted(transport: Any, request: Any) -> Any:
            begin = time.perf_counter()
            with self._sending(request.url):
                response = await astream(transport, request)
                answer = self._begun(request.url, response.status, begin, request.body)
            if answer is not None:
                response._chunks = answer.aread(response._chunks)
            return response

        sync.stream, asynchronous._do_stream = counted, acounted


class _Answer:
    """The body of one answer, read as the client reads it. It ends once: complete, closed, or its reader gone."""

    def __init__(self, ended: Callable[[_Answer, bytes], None], begin: float) -> None:
        self._ended, self.begin = ended, begin
        self._body, self._is_read = bytearray(), False

    def end(self, body: bytes) -> None:
        self._ended(self, body)

    def _take(self, chunk: bytes) -> bytes:
        self._is_read = False
        self._body += chunk
        if self._body[-20:].rstrip().endswith(b"[DONE]"):  # some clients read no further
            self.end(bytes(self._body))
        return chunk

    def read(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        try:
            self._is_read = True
            for chunk in chunks:
                yield self._take(chunk)
                self._is_read = True
        finally:
            self.end(bytes(self._body))

    async def aread(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        try:
            self._is_read = True
            async for chunk in chunks:
                yield self._take(chunk)
                self._is_read = True
        finally:
            self.end(bytes(self._body))

    def following(self, iterate: Callable[..., Iterator[bytes]]) -> Callable[..., Iterator[bytes]]:
        return lambda *args, **options: self.read(iterate(*args, **options))

    def afollowing(self, iterate: Callable[..., AsyncIterator[bytes]]) -> Callable[..., AsyncIterator[bytes]]:
        return lambda *args, **options: self.aread(iterate(*args, **options))

    def closing(self, close: Callable[[], None]) -> Callable[[], None]:
        def closed() -> None:
            close()
            self._closed()

        return closed

    def aclosing(self, close: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
        async def closed() -> None:
            await close()
            self._closed()

        return closed

    def _closed(self) -> None:
        if not self._is_read:  # else the client closes what it has read to its end, and a last chunk may follow
            self.end(bytes(self._body))


def _is_call(url: str) -> bool:
    return urlsplit(url).path.endswith(_PATHS)


def usage_of(body: bytes) -> dict[str, int | None]:
    """Prompt, cached and completion tokens by the body of an answer: JSON, or events of which one tells the usage."""
    for event in [body] if body.lstrip()[:1] == b"{" else reversed(body.split(b"\n")):
        try:
            told = json.loads(event.removeprefix(b"data:"))
        except ValueError:
            continue
        holder = told.get("response", told) if isinstance(told, dict) else {}  # the last event of `responses`
        usage = holder.get("usage") if isinstance(holder, dict) else None
        if isinstance(usage, dict):
            return _counts(usage)
    return {"prompt": None, "cached": None, "completion": None}


def _counts(usage: Mapping[str, Any]) -> dict[str, int | None]:
    prompt = usage.get("prompt_tokens", usage.get("input_tokens"))
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    cached = details.get("cached_tokens")
    if "cache_read_input_tokens" in usage and prompt is not None:  # Anthropic counts what it cached beside the prompt
        cached = usage["cache_read_input_tokens"] or 0
        prompt += cached + (usage.get("cache_creation_input_tokens") or 0)
    return {
        "prompt": prompt,
        "cached": cached,
        "completion": usage.get("completion_tokens", usage.get("output_tokens")),
    }
