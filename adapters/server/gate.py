"""Gate: the checks before every route: request id, API key, drain and limits."""

from __future__ import annotations

import hmac
import logging
import re
import secrets
import time
from typing import TYPE_CHECKING

from graftlm.adapters.server.http.errors import ApiError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from graftlm.adapters.server.app import Server

log = logging.getLogger("graftlm.server")

_ID = re.compile(rb"[\w.:-]{1,128}")
GENERATING = frozenset(
    ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/api/chat", "/api/generate")
)


class Gate:
    """An ASGI wrapper without a task or a queue of its own, so that disconnects reach the routes."""

    def __init__(self, app: ASGIApp, server: Server) -> None:
        self._app = app
        self._server = server
        self._keys = [key.encode() for key in server.settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given if _ID.fullmatch(given) else secrets.token_hex(12).encode()
        scope["graftlm.request_id"] = request_id.decode()
        if self._server.sends_outside_tasks:
            scope["graftlm.bare_send"] = send  # wrappers of `send` change headers only
        started, status = time.monotonic(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        try:
            refusal = self._refusal(scope["path"], headers)
            if refusal is not None:
                await _send_error(refusal, scope["path"], send_with_id)
            else:
                await self._app(scope, receive, send_with_id)
        finally:
            took = (time.monotonic() - started) * 1e3
            level = logging.DEBUG if scope["path"] in self._server.settings.open_paths else logging.INFO
            log.log(level, "%s %s %s %d %.1f ms", request_id.decode(), scope["method"], scope["path"], status, took)

    def _refusal(self, path: str, headers: dict[bytes, bytes]) -> ApiError | None:
        server = self._server
        if self._keys and path not in server.settings.open_paths and not self._has_key(headers):
            message = "the API key is missing or wrong; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
            return ApiError(401, message, code="invalid_api_key")
        if path not in GENERATING:
            return None
        if (reason := server.unavailable()) is not None:
            return ApiError(503, reason, kind="server_error", code="unavailable", retry_after=5)
        num_open, limit = server.num_open, server.settings.max_open_requests
        if num_open >= limit:
            message = f"{num_open} requests are open, the server takes {limit}; try again later"
            return ApiError(429, message, kind="rate_limit_error", code="too_many_requests", retry_after=1)
        return None

    def _has_key(self, headers: dict[bytes, bytes]) -> bool:
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        given = key.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
        # Compare all keys, so that the time reveals nothing about a partial match.
        return sum(hmac.compare_digest(given, own) for own in self._keys) > 0


async def _send_error(error: ApiError, path: str, send: Send) -> None:
    headers = [(b"content-type", b"application/json")]
    headers += [(name.encode(), value.encode()) for name, value in error.headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": error.body(path)})
