"""HttpCalls: model calls of HTTP clients to OpenAI-compatible APIs, counted by the usage that the answers tell."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from functools import wraps
from typing import Any
from urllib.parse import urlsplit

_PATHS = ("/completions", "/responses", "/messages")
_LM15 = ("lm15.transports", "dspy._vendor.lm15.transports")
"""DSPy's own HTTP client, by itself and as DSPy brings it."""


class HttpCalls:
    """Counts completed requests. A count is None where an answer did not tell it: then the sum is unknown.

    hook  may be called again: each client library of the process is hooked once, when it is there
    span    is told when each call began, at its end
    prompt  is told the body of each request that was answered
    """

    def __init__(self, span: Callable[[float], None], prompt: Callable[[Any], None] = lambda body: None) -> None:
        self._span, self._prompt = span, prompt
        self._lock = threading.Lock()
        self._hooked: set[str] = set()
        self._usages: list[Mapping[str, int | None]] = []
        self.refused: Counter[int] = Counter()
        """Requests that were answered with an error, by HTTP status."""

    def reset(self) -> None:
        with self._lock:
            self._usages, self.refused = [], Counter()

    @property
    def num(self) -> int:
        return len(self._usages)

    def total(self, what: str) -> int | None:
        """The sum of `prompt`, `cached` or `completion` tokens; None if there was no call, or one did not tell."""
        with self._lock:
            values = [usage[what] for usage in self._usages]
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

    def _begun(self, url: str, status: int, begin: float, body: Any) -> _Answer | None:
        """Follow one answer, to a request with this body; None if it is not a model's."""
        if not urlsplit(url).path.endswith(_PATHS):
            return None
        if status >= 400:
            with self._lock:
                self.refused[status] += 1
            return None
        self._prompt(body)
        return _Answer(self, begin)

    def _ended(self, begin: float, usage: Mapping[str, int | None]) -> None:
        with self._lock:
            self._usages.append(usage)
        self._span(begin)

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
            return response

        @wraps(send)
        def counted(client: Any, request: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            return follow(request, send(client, request, **options), begin)

        @wraps(asend)
        async def acounted(client: Any, request: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            return follow(request, await asend(client, request, **options), begin)

        httpx.Client.send, httpx.AsyncClient.send = counted, acounted

    def _hook_requests(self, requests: Any) -> None:
        send = requests.Session.send

        @wraps(send)
        def counted(session: Any, request: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            response = send(session, request, **options)
            answer = self._begun(request.url, response.status_code, begin, request.body)
            if answer is not None and not options.get("stream"):
                answer.end(response.content)
            elif answer is not None:
                response.iter_content = answer.following(response.iter_content)
            return response

        requests.Session.send = counted

    def _hook_lm15(self, transports: Any) -> None:
        sync, asynchronous = transports.StdlibTransport, transports.StdlibAsyncTransport
        stream, astream = sync.stream, asynchronous._do_stream

        @wraps(stream)
        def counted(transport: Any, request: Any) -> Any:
            begin = time.perf_counter()
            response = stream(transport, request)
            if (answer := self._begun(request.url, response.status, begin, request.body)) is not None:
                response._chunks = answer.read(response._chunks)
            return response

        @wraps(astream)
        async def acounted(transport: Any, request: Any) -> Any:
            begin = time.perf_counter()
            response = await astream(transport, request)
            if (answer := self._begun(request.url, response.status, begin, request.body)) is not None:
                response._chunks = answer.aread(response._chunks)
            return response

        sync.stream, asynchronous._do_stream = counted, acounted


class _Answer:
    """The body of one answer, read as the client reads it."""

    def __init__(self, calls: HttpCalls, begin: float) -> None:
        self._calls, self._begin, self._body, self._done = calls, begin, bytearray(), False

    def end(self, body: bytes) -> None:
        """The answer is complete, or its reader has gone away. Counts once."""
        if not self._done:
            self._done = True
            self._calls._ended(self._begin, usage_of(body))

    def _take(self, chunk: bytes) -> bytes:
        self._body += chunk
        if b"[DONE]" in chunk:  # some clients read no further
            self.end(bytes(self._body))
        return chunk

    def read(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        try:
            for chunk in chunks:
                yield self._take(chunk)
        finally:
            self.end(bytes(self._body))

    async def aread(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        try:
            async for chunk in chunks:
                yield self._take(chunk)
        finally:
            self.end(bytes(self._body))

    def following(self, iterate: Callable[..., Iterator[bytes]]) -> Callable[..., Iterator[bytes]]:
        return lambda *args, **options: self.read(iterate(*args, **options))

    def afollowing(self, iterate: Callable[..., AsyncIterator[bytes]]) -> Callable[..., AsyncIterator[bytes]]:
        return lambda *args, **options: self.aread(iterate(*args, **options))


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
