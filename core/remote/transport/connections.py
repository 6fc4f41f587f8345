"""Connections: SDK clients for one endpoint, of one connection each."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from graftlm.core.errors import ConfigError

if TYPE_CHECKING:
    import ssl

    import openai

    from graftlm.core.remote.config import EndpointConfig

_KEPT_S = 5.0  # seconds that an unused connection is kept, as in the SDK


class Connections:
    """A pool of SDK clients: lends one to each request, and keeps it for a later one.

    A shared client scans all of its connections for each request and polls the idle ones: with 64 in flight that is a
    quarter of a call's CPU time. The most recently used client is lent first, and a client that was idle for `kept_s`
    seconds is closed. Used on one event loop, except `open`.
    """

    def __init__(self, config: EndpointConfig, *, kept_s: float = _KEPT_S) -> None:
        self._config = config
        self._kept_s = kept_s
        self._clients: set[openai.AsyncOpenAI] = set()
        self._idle: deque[tuple[float, openai.AsyncOpenAI]] = deque()  # (idle since, client), oldest first
        self._closing: set[asyncio.Task[None]] = set()
        self._tls: ssl.SSLContext | bool | None = None

    def open(self) -> None:
        """Build a client, on any thread. The first in a process takes a second for imports."""
        if not self._clients:
            self._idle.append((time.monotonic(), self._new()))

    def take(self) -> openai.AsyncOpenAI:
        """Lend a client that no other request uses."""
        return self._idle.pop()[1] if self._idle else self._new()

    def give_back(self, client: openai.AsyncOpenAI) -> None:
        """Keep a client, and close clients that were idle for too long."""
        now_s = time.monotonic()
        while self._idle and now_s - self._idle[0][0] > self._kept_s:
            unused = self._idle.popleft()[1]
            self._clients.discard(unused)
            closing = asyncio.get_running_loop().create_task(unused.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        if client in self._clients:
            self._idle.append((now_s, client))

    async def close(self) -> None:
        """Close all clients, including those in use."""
        clients, self._clients = self._clients, set()
        self._idle.clear()
        for client in clients:
            await client.close()

    def _new(self) -> openai.AsyncOpenAI:
        """Build a client without timeouts and retries: the sender of a request handles both."""
        try:
            import openai
        except ImportError as error:
            raise ConfigError("models at an endpoint need the openai package; pip install 'graftlm[remote]'") from error
        config = self._config
        if self._tls is None:
            self._tls = _tls_context(openai)
        client = openai.AsyncOpenAI(
            api_key=config.api_key or "none",
            base_url=config.base_url,
            max_retries=0,
            timeout=None,
            default_headers=dict(config.headers or {}),
            http_client=openai.DefaultAsyncHttpxClient(verify=self._tls),
        )
        if not config.host.endswith("openai.com"):  # read from the environment, and valid for OpenAI only
            client.organization = client.project = None
        self._clients.add(client)
        return client


_contexts: dict[tuple[object, ...], ssl.SSLContext] = {}
"""The most recent TLS context, by its certificate files."""


def _tls_context(openai: Any) -> ssl.SSLContext | bool:
    """Return the TLS context of the SDK's HTTP library, which takes 30 ms to read; True leaves it to each client.

    The SDK uses httpx or httpx2, by its version. Neither is imported here. Endpoints of a process share a context
    of the same files: programs that open an endpoint for each task spent most of their time on it.
    """
    import ssl

    library = sys.modules[openai.DefaultAsyncHttpxClient.__base__.__module__.partition(".")[0]]
    make = getattr(library, "create_ssl_context", None)
    if make is None:
        return True
    # packages that read the system's certificates replace the names of `ssl`
    key = (make, ssl.SSLContext, ssl.create_default_context, *_certificate_files())
    context: ssl.SSLContext | None = _contexts.get(key)
    if context is None:
        context = make()
        if type(context).__module__ == "ssl":  # contexts of such packages change with each connection
            _contexts.clear()
            _contexts[key] = context
    return context


def _certificate_files() -> list[tuple[str, int, int]]:
    """Return (path, last change in ns, size in bytes) of each certificate file; zeros if it is missing."""
    import ssl

    paths = ssl.get_default_verify_paths()
    named = [os.environ.get("SSL_CERT_FILE", ""), os.environ.get("SSL_CERT_DIR", "")]
    found: list[tuple[str, int, int]] = []
    for name in (*named, paths.openssl_cafile, paths.openssl_capath):
        try:
            status = os.stat(name)
        except OSError:
            found.append((name, 0, 0))
        else:
            found.append((name, status.st_mtime_ns, status.st_size))
    return found
