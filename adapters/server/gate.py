"""Gate: the checks before every route: request id, Host and Origin, API key, drain and limits."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from graftlm.adapters.server.access import Access
from graftlm.adapters.server.http.errors import ApiError
from graftlm.adapters.server.settings import is_loopback
from graftlm.core.serving.telemetry import span_of

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from graftlm.adapters.server.app import Server

log = logging.getLogger("graftlm.server")

_ID = re.compile(rb"[\w.:-]{1,128}")
GENERATING = frozenset(
    ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/api/chat", "/api/generate")
    + ("/v1/embeddings", "/v1/rerank", "/v1/score", "/embeddings", "/rerank", "/score", "/api/embed")
)


class Gate:
    """An ASGI wrapper without a task or a queue of its own, so that disconnects reach the routes.

    num_open  generating requests that have entered and have not been answered, those that still send their body too.
    """

    def __init__(self, app: ASGIApp, server: Server) -> None:
        settings = server.settings
        self._app = app
        self._server = server
        self._keys = [key.encode() for key in settings.api_keys]
        self._callers = _callers(self._keys)
        # With a key, a page of another origin cannot write a valid request.
        self._keyless = not self._keys and is_loopback(settings.host)
        self._origins = frozenset(origin.lower() for origin in settings.allowed_origins)
        self._hosts = {name.lower() for name in (settings.host, *settings.allowed_hosts)}
        self.num_open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given if _ID.fullmatch(given) else secrets.token_hex(12).encode()
        client = str((scope.get("client") or ("",))[0])
        access = scope["graftlm.access"] = Access(request_id.decode(), client, caller=client)
        access.make_current()
        if self._server.sends_outside_tasks:
            scope["graftlm.bare_send"] = send  # wrappers of `send` change headers only
        status = 0
        cors = self._cors(headers)

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", access.id.encode()),
                    *ignored(access),
                    *cors,
                ]
            await send(message)

        generates, path = scope["path"] in GENERATING, scope["path"]
        refusal = self._refusal(path, headers, access)
        self.num_open += generates
        try:
            if cors and scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
                await _send_preflight(headers, send_with_id)
            elif refusal is not None:
                access.reason = refusal.error["code"] or ""
                await _send_error(refusal, path, send_with_id)
            else:
                with span_of(headers):
                    await self._app(scope, receive, send_with_id)
        finally:
            self.num_open -= generates
            if access.gone:
                status = 499
            self._server.metrics.answered(status)
            level = logging.DEBUG if path in self._server.settings.open_paths else logging.INFO
            if log.isEnabledFor(level):
                log.log(level, "%s", access.line(scope["method"], path, status))

    def _refusal(self, path: str, headers: dict[bytes, bytes], access: Access) -> ApiError | None:
        server = self._server
        if self._keyless and (foreign := self._foreign(headers)) is not None:
            return foreign
        if self._keys:
            key = self._key_of(headers)
            if key is not None:
                access.caller, access.namespace = self._callers[key]
            elif path not in server.settings.open_paths:
                message = "the API key is missing or wrong; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
                return ApiError(401, message, code="invalid_api_key")
        if path not in GENERATING:
            return None
        if (reason := server.unavailable()) is not None:
            return ApiError(503, reason, kind="server_error", code="unavailable", retry_after=5)
        limit = server.settings.max_open_requests
        if self.num_open >= limit:
            message = f"{self.num_open} requests are open, the server takes {limit}; try again later"
            return ApiError(429, message, kind="rate_limit_error", code="too_many_requests", retry_after=1)
        return None

    def _cors(self, headers: dict[bytes, bytes]) -> list[tuple[bytes, bytes]]:
        """Return the headers that let a page of an allowed origin read the answer; [] for all other requests."""
        origin = headers.get(b"origin")
        if origin is None or not self._allows(origin.decode("latin-1")):
            return []
        exposed = b"x-request-id, x-ignored-fields, retry-after"
        allowed = (b"access-control-allow-origin", origin)
        return [allowed, (b"access-control-expose-headers", exposed), (b"vary", b"origin")]

    def _allows(self, origin: str) -> bool:
        return "*" in self._origins or origin.lower() in self._origins

    def _key_of(self, headers: dict[bytes, bytes]) -> bytes | None:
        """Return the server's key that a request brings. Compares all, so that the time reveals no partial match."""
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        given = key.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
        equal = [own for own in self._keys if hmac.compare_digest(given, own)]
        return equal[0] if equal else None

    def _foreign(self, headers: dict[bytes, bytes]) -> ApiError | None:
        """Return the refusal of a request that a page of another origin caused, or that reached another name.

        A name of another site that resolves to this machine gives its pages access to the server (DNS rebinding).
        """
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if host and not self._is_own(_name_of(host)):
            message = f"the server is not {_name_of(host)!r}; start it with --allowed-host to give it this name"
            return ApiError(403, message, code="host_not_allowed")
        origin = headers.get(b"origin")
        if origin is not None and not self._allows(origin.decode("latin-1")):
            given = urlsplit(origin.decode("latin-1").lower())
            if given.scheme not in ("http", "https") or given.netloc != host:
                message = (
                    f"pages of {origin.decode('latin-1')!r} may not use this server; start it with --allowed-origin"
                )
                return ApiError(403, message, code="origin_not_allowed")
        return None

    def _is_own(self, name: str) -> bool:
        return name in self._hosts or name.endswith(".localhost") or is_loopback(name)


def _name_of(host: str) -> str:
    """Return the name of a Host header, without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if ":" in host else host


def _callers(keys: list[bytes]) -> dict[bytes, tuple[str, str]]:
    """Return the name and the KV namespace of the caller of each key.

    Several keys have namespaces of their own: token counts and latencies of one key reveal no prompts of another. They
    are MACs under a secret of this process, which no caller can compute for a `cache_salt`.
    """
    secret = secrets.token_bytes(32)
    found = {}
    for key in keys:
        name = hmac.new(secret, key, hashlib.sha256).hexdigest()[:32]
        found[key] = name, f"{name}:" if len(keys) > 1 else ""
    return found


def ignored(access: Access) -> list[tuple[bytes, bytes]]:
    """Return the header that lists the fields of the body that were ignored."""
    names = ", ".join(access.ignored)
    return [(b"x-ignored-fields", names.encode("ascii", "backslashreplace"))] if names else []


async def _send_preflight(headers: dict[bytes, bytes], send: Send) -> None:
    """Answer the question of a browser whether a page may send a request."""
    asked = headers.get(b"access-control-request-headers", b"authorization, content-type")
    allowed = [
        (b"access-control-allow-methods", b"GET, POST, DELETE"),
        (b"access-control-allow-headers", asked),
        (b"access-control-max-age", b"600"),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": allowed})
    await send({"type": "http.response.body", "body": b""})


async def _send_error(error: ApiError, path: str, send: Send) -> None:
    headers = [(b"content-type", b"application/json")]
    headers += [(name.encode(), value.encode()) for name, value in error.headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": error.body(path)})
