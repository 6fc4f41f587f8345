"""Connection: the bounds of a connection before a request reaches the application.

A connection holds at most one head of a request and 64 KiB of its body. A head or a body that is too large or does not
arrive in time is refused here, before a key is checked. Each read of a socket passes here; it costs a microsecond.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from graftlm.adapters.server.access import access_of
from graftlm.adapters.server.bodies import DROPPED_BYTES_S
from graftlm.adapters.server.http.errors import ApiError

if TYPE_CHECKING:
    from graftlm.adapters.server.settings import Limits

LINGER_S = 1.0
"""Seconds in which a refused client can read the answer; what it sends meanwhile is dropped."""

CHUNK_OVERHEAD = 8
"""Bytes beside each byte of a body in chunks: a chunk of one byte has five. More are trailers or extensions."""

SEND_BYTES = 256 << 10
"""Bytes of answers that the system holds for a connection whose client does not read; it would hold 4 MB by itself."""

SAY_EVERY_S = 10.0

log = logging.getLogger("graftlm.server")


class Connections:
    """All connections of a server. The waiting ones have no request that the application works on.

    max_connections  limit of all clients together, which follows from the limit of open files.
    """

    def __init__(self, limits: Limits, max_connections: int) -> None:
        self.limits = limits
        self.max_connections = max_connections
        self._num_all = 0
        self._num_of: dict[str, int] = {}
        self._waiting: OrderedDict[Connection, None] = OrderedDict()
        self._waiting_of: dict[str, OrderedDict[Connection, None]] = {}
        self._said_s = 0.0
        self._dropped_until_s = 0.0

    def enter(self, connection: Connection) -> bool:
        """Count a new connection. At a limit, close the one that has waited longest; return False if none waits."""
        client = connection.name
        free = True
        if self._num_of.get(client, 0) >= self.limits.connections_per_client:
            free = self._close_oldest(self._waiting_of.get(client))
        elif self._num_all >= self.max_connections:
            free = self._close_oldest(self._waiting)
        self._num_all += 1
        self._num_of[client] = self._num_of.get(client, 0) + 1
        if free:
            self.waits(connection)
        return free

    def leave(self, connection: Connection) -> None:
        client = connection.name
        self.works(connection)
        self._num_all -= 1
        self._num_of[client] -= 1
        if not self._num_of[client]:
            del self._num_of[client]
            self._waiting_of.pop(client, None)

    def dropped(self, num_bytes: int) -> float:
        """Count bytes that a connection drops; return the seconds until it may read more."""
        now = time.monotonic()
        self._dropped_until_s = max(self._dropped_until_s, now) + num_bytes / DROPPED_BYTES_S
        return self._dropped_until_s - now

    def waits(self, connection: Connection) -> None:
        self._waiting[connection] = None
        self._waiting_of.setdefault(connection.name, OrderedDict())[connection] = None

    def works(self, connection: Connection) -> None:
        """Note that a request has reached the application, or that the connection is closed."""
        self._waiting.pop(connection, None)
        self._waiting_of.get(connection.name, OrderedDict()).pop(connection, None)

    def _close_oldest(self, waiting: OrderedDict[Connection, None] | None) -> bool:
        if not waiting:
            return False
        oldest = next(iter(waiting))
        now = time.monotonic()
        if now > self._said_s + SAY_EVERY_S:
            self._said_s = now
            log.warning("too many connections of %s or of all clients: those that wait longest are closed", oldest.name)
        self.works(oldest)
        oldest.transport.abort()
        return True


class Connection(HttpToolsProtocol):
    """A connection of Uvicorn that bounds the bytes, the number and the time of headers, the time of a body, and the
    time in which the client reads an answer.

    name  the client's address
    """

    def __init__(self, connections: Connections, **given: Any) -> None:
        super().__init__(**given)
        self.name = ""
        self._connections = connections
        self._limits = connections.limits
        self._refused = False
        self._in_head = True
        self._ended = False  # whether a request ended in the bytes that are parsed
        self._num_head = 0  # bytes of the head so far
        self._num_body = 0
        self._num_extra = 0  # bytes of chunk sizes, extensions and trailers
        self._timer: asyncio.TimerHandle | None = None
        self._times_head = True
        self._writer_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.name = str(self.client[0]) if self.client else ""
        peer = transport.get_extra_info("socket")
        if peer is not None:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
        if not self._connections.enter(self):
            text = f"{self.name} has {self._limits.connections_per_client} connections that are all in use; close some"
            self._refuse(429, text, "too_many_connections")
            return
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.leave(self)
        self._unwatch()
        self._taken()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        answered = not self._in_head and self.cycle is not None and self.cycle.response_complete
        if self._refused or answered:  # the rest of the request is dropped
            self.flow.pause_reading()
            self.loop.call_later(self._connections.dropped(len(data)), _read_on, self)
        view, limit = memoryview(data), self._limits.header_bytes
        while view and not self._refused and not self.transport.is_closing():
            piece = view[: limit + 1 - self._num_head] if self._in_head else view
            view = view[len(piece) :]
            self._ended = False
            was_in_head, num_body = self._in_head, self._num_body
            super().data_received(piece)  # type: ignore[arg-type]  # the parser reads any buffer
            if self._in_head:
                self._num_head = 0 if self._ended else self._num_head + len(piece)
                if self._num_head > limit:
                    self._refuse(431, f"the headers are longer than {limit:,} bytes; send less", "headers_too_large")
            elif not was_in_head:
                self._num_extra += len(piece) - (self._num_body - num_body)
                if self._num_extra > limit + CHUNK_OVERHEAD * self._num_body:
                    self._refuse(431, "the body's chunks have more framing than content", "headers_too_large")
        if not self._refused:
            self._watch()

    # -- the parser's callbacks ------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_body = self._num_extra = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) < self._limits.headers:
            super().on_header(name, value)
        elif not self._refused:
            limit = self._limits.headers
            self._refuse(431, f"the request has more than {limit} headers; send fewer", "headers_too_large")

    def on_headers_complete(self) -> None:
        self._in_head = False
        if not self._refused:
            self._connections.works(self)
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_body += len(body)
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_head = self._ended = True
        self._num_head = 0
        if not self._refused:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.get_write_buffer_size():
            self._waits_for_reader()
        if not self.transport.is_closing() and not self.pipeline:
            self._connections.waits(self)

    # -- time ------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Start or stop the timer: a head or a body that has begun must be complete in time."""
        in_body = not self._in_head
        if self._timer is not None and self._times_head == in_body or (self._timer and self._rests()):
            self._unwatch()
        if self._timer is None and not self._rests():
            self._times_head = not in_body
            self._timer = self.loop.call_later(self._limits.body_s if in_body else self._limits.header_s, self._late)

    def _rests(self) -> bool:
        """Return True between two requests, and while the application works on a complete one."""
        return self._in_head and self._num_head == 0 and self.cycle is not None

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        if self._times_head:
            self._refuse(408, f"the headers took longer than {self._limits.header_s:g} s", "header_timeout")
        else:
            self._refuse(408, f"the body took longer than {self._limits.body_s:g} s", "body_timeout")

    # -- slow readers ----------------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._waits_for_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._taken()

    def _waits_for_reader(self) -> None:
        """Note that bytes of an answer wait for the client. It must read most of them in time."""
        if self._writer_timer is None:
            self._writer_timer = self.loop.call_later(self._limits.write_s, self._not_read)

    def _taken(self) -> None:
        if self._writer_timer is not None:
            self._writer_timer.cancel()
            self._writer_timer = None

    def _not_read(self) -> None:
        """Close the connection, which cancels its request."""
        self._writer_timer = None
        if not self.transport.get_write_buffer_size():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            access_of(self.cycle.scope).reason = "reads_too_slowly"  # type: ignore[arg-type]
        else:
            log.info("%s reason=reads_too_slowly", self.name or "-")  # the answer was complete and logged
        self.transport.abort()

    # -- refusal ---------------------------------------------------------------------------------------------------

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Answer with an error, unless an answer has begun, and close the connection."""
        if self._refused:
            return
        self._refused = True
        self._unwatch()
        begun = self.cycle is not None and not self.cycle.response_complete and self.cycle.response_started
        if self.cycle is not None and not self.cycle.response_complete:
            access_of(self.cycle.scope).reason = code  # type: ignore[arg-type]
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.transport.is_closing():
            return
        if begun:
            self.transport.abort()
            return
        kind = "rate_limit_error" if status == 429 else "invalid_request_error"
        body = json.dumps({"error": ApiError(status, message, kind=kind, code=code).error}).encode()
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.write_eof()
        self._timer = self.loop.call_later(LINGER_S, self.transport.abort)
        log.info("%s %d reason=%s", self.name or "-", status, code)


def _read_on(connection: Connection) -> None:
    if not connection.transport.is_closing():
        connection.flow.resume_reading()
