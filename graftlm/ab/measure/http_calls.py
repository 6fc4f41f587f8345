"""HttpCalls: model calls of HTTP clients to OpenAI-compatible APIs, counted by the usage in the answers."""

from __future__ import annotations

import inspect
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any
from urllib.parse import urlsplit

_PATHS = ("/completions", "/responses", "/messages")
_CLIENTS = [
    *((module, kind, "send") for module in ("httpx", "httpx2") for kind in ("Client", "AsyncClient")),
    ("requests", "Session", "send"),
    *((f"{owner}lm15.transports", kind, name) for owner in ("", "dspy._vendor.") for kind, name in (
        ("StdlibTransport", "stream"), ("StdlibAsyncTransport", "_do_stream"))),
]  # fmt: skip
"""Module, class and method by which a client library sends a request. lm15 is DSPy's own, alone or inside DSPy."""


class HttpCalls:
    """A counter of answered requests. A sum is None if one answer lacks its count.

    An answer that is still being read at `reset` belongs to no later count.

    span    called at the end of each call with the time of its beginning
    prompt  called with the body of each request that was answered
    """

    def __init__(self, span: Callable[[float], None], prompt: Callable[[Any], None] = lambda body: None) -> None:
        self._span, self._prompt = span, prompt
        self._lock = threading.Lock()
        self._hooked: set[tuple[str, str, str]] = set()
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
        """Return the sum of `prompt`, `cached` or `completion` tokens; None without calls, or where one lacks it."""
        with self._lock:
            values = [usage[what] for usage in self._usages] + [None] * len(self._open)
        known = [value for value in values if value is not None]
        return sum(known) if values and len(known) == len(values) else None

    def hook(self) -> None:
        """Let every client library that is loaded report its requests; each is hooked once."""
        for client in _CLIENTS:
            module, kind, name = client
            if module in sys.modules and client not in self._hooked:
                self._hooked.add(client)
                self._hook(getattr(sys.modules[module], kind), name)

    def _hook(self, owner: Any, name: str) -> None:
        send = getattr(owner, name)
        if inspect.iscoroutinefunction(send):

            @wraps(send)
            async def counted(client: Any, request: Any, **options: Any) -> Any:
                with self._sending(str(request.url)) as begin:
                    return self._followed(request, await send(client, request, **options), begin)
        else:

            @wraps(send)
            def counted(client: Any, request: Any, **options: Any) -> Any:
                with self._sending(str(request.url)) as begin:
                    return self._followed(request, send(client, request, **options), begin)

        setattr(owner, name, counted)

    @contextmanager
    def _sending(self, url: str) -> Iterator[float]:
        """Count a request as under way until its answer is followed; yields the time of its beginning."""
        counts = int(_is_call(url))
        with self._lock:
            self._num_sent += counts
        try:
            yield time.perf_counter()
        finally:
            with self._lock:
                self._num_sent -= counts

    def _followed(self, request: Any, response: Any, begin: float) -> Any:
        """Count the answer of a model, and follow its body where that is still being read."""
        if not _is_call(str(request.url)):
            return response
        status = getattr(response, "status_code", None) or response.status
        if status >= 400:
            with self._lock:
                self.refused[status] += 1
            return response
        self._prompt(getattr(request, "_content", getattr(request, "body", None)))  # httpx has none where it streams
        answer = _Answer(self._ended, begin)
        with self._lock:
            self._open.add(answer)
        if getattr(response, "is_closed", False) or getattr(response, "_content_consumed", False):
            answer.end(response.content)
        elif hasattr(response, "_chunks"):
            response._chunks = answer.read(response._chunks)
        else:
            answer.follow(response)
        return response

    def _ended(self, answer: _Answer, body: bytes) -> None:
        usage = usage_of(body)
        with self._lock:
            if answer not in self._open:
                return
            self._open.remove(answer)
            self._usages.append(usage)
        self._span(answer.begin)


class _Answer:
    """The body of one answer, read as the client reads it. It ends once: complete, closed, or its reader gone."""

    def __init__(self, ended: Callable[[_Answer, bytes], None], begin: float) -> None:
        self._ended, self.begin = ended, begin
        self._body, self._is_read = bytearray(), False

    def end(self, body: bytes) -> None:
        self._ended(self, body)

    def follow(self, response: Any) -> None:
        """Read along wherever the client reads the response, and end where the client closes it."""
        for name in ("iter_bytes", "aiter_bytes", "iter_content"):
            if hasattr(response, name):
                setattr(response, name, self._reading(getattr(response, name)))
        for name in ("close", "aclose"):
            if hasattr(response, name):
                setattr(response, name, self._closing(getattr(response, name)))

    def read(self, chunks: Any) -> Any:
        """Yield the chunks of an iterator, or of an asynchronous one."""
        return self._aread(chunks) if hasattr(chunks, "__aiter__") else self._read(chunks)

    def _take(self, chunk: bytes) -> bytes:
        self._is_read = False
        self._body += chunk
        if self._body[-20:].rstrip().endswith(b"[DONE]"):  # some clients read no further
            self.end(bytes(self._body))
        return chunk

    def _read(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        try:
            self._is_read = True
            for chunk in chunks:
                yield self._take(chunk)
                self._is_read = True
        finally:
            self.end(bytes(self._body))

    async def _aread(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        try:
            self._is_read = True
            async for chunk in chunks:
                yield self._take(chunk)
                self._is_read = True
        finally:
            self.end(bytes(self._body))

    def _reading(self, iterate: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **options: self.read(iterate(*args, **options))

    def _closing(self, close: Callable[[], Any]) -> Callable[[], Any]:
        def closed() -> None:
            close()
            self._closed()

        async def aclosed() -> None:
            await close()
            self._closed()

        return aclosed if inspect.iscoroutinefunction(close) else closed

    def _closed(self) -> None:
        if not self._is_read:  # else the client closes a body that it has read, and a last chunk may follow
            self.end(bytes(self._body))


def _is_call(url: str) -> bool:
    return urlsplit(url).path.endswith(_PATHS)


def usage_of(body: bytes) -> dict[str, int | None]:
    """Return prompt, cached and completion tokens of an answer: JSON, or events of which one holds the usage."""
    for event in [body] if body.lstrip()[:1] == b"{" else reversed(body.split(b"\n")):
        try:
            read = json.loads(event.removeprefix(b"data:"))
        except ValueError:
            continue
        holder = read.get("response", read) if isinstance(read, dict) else {}  # the last event of `responses`
        usage = holder.get("usage") if isinstance(holder, dict) else None
        if isinstance(usage, dict):
            return _counts(usage)
    return {"prompt": None, "cached": None, "completion": None}


def _counts(usage: Mapping[str, Any]) -> dict[str, int | None]:
    prompt = usage.get("prompt_tokens", usage.get("input_tokens"))
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    cached = details.get("cached_tokens")
    if "cache_read_input_tokens" in usage and prompt is not None:  # Anthropic counts cached tokens beside the prompt
        cached = usage["cache_read_input_tokens"] or 0
        prompt += cached + (usage.get("cache_creation_input_tokens") or 0)
    completion = usage.get("completion_tokens", usage.get("output_tokens"))
    return {"prompt": prompt, "cached": cached, "completion": completion}
