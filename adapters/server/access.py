"""Access: the caller of a request, and the line that the log has about it.

One record is made for each HTTP request and costs a few microseconds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graftlm.core.request import Usage

MAX_SHOWN = 200  # characters of a client's text in a line of the log


def printable(text: str) -> str:
    """Return a text on one line: characters that could forge a line or steer a terminal are escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shown(text: str) -> str:
    """Return a client's text for the log: printable, at most MAX_SHOWN characters."""
    return printable(text[:MAX_SHOWN]) + ("..." if len(text) > MAX_SHOWN else "")


@dataclass
class Access:
    """One request, for the log and for the limits of a caller.

    client      address of the other end of the connection
    caller      the name of the API key, or `client` if the server has no keys; callers share the server fairly
    namespace   prefix of the request's KV namespace; different with each of several keys, else ""
    model       the model that the body asks for
    reason      the cause of an answer other than 200, or "cancelled"
    usage       token counts, once the request has ended
    num_tokens  generated tokens so far of a stream
    num_bytes   size of the body
    ignored     paths of unknown fields of the body, with `--ignore-unknown`
    """

    id: str
    client: str
    caller: str = ""
    namespace: str = ""
    model: str = ""
    reason: str = ""
    usage: Usage | None = None
    num_tokens: int = 0
    num_bytes: int = 0
    ignored: tuple[str, ...] = ()
    started_s: float = field(default_factory=time.monotonic)

    def make_current(self) -> None:
        """Make `current` return this record in the running task and in the threads that it waits for."""
        _current.set(self)

    def note_gone(self) -> None:
        """Note that the client has gone, unless the server has closed the connection for a reason."""
        self.reason = self.reason or "cancelled"

    @property
    def gone(self) -> bool:
        """Whether the client takes no answer, which status 499 stands for in the log and in the metrics."""
        return self.reason in ("cancelled", "reads_too_slowly")

    def line(self, method: str, path: str, status: int) -> str:
        """Return the line of the log."""
        took_ms = (time.monotonic() - self.started_s) * 1e3
        parts = [self.id, self.client or "-", shown(method), shown(path), f"{status}", f"{took_ms:.1f} ms"]
        if self.model:
            parts.append(f"model={shown(self.model)}")
        if self.usage is not None:
            parts.append(f"prompt={self.usage.prompt_tokens} generated={self.usage.completion_tokens}")
        elif self.num_tokens:
            parts.append(f"generated={self.num_tokens}")
        if self.ignored:
            parts.append(f"ignored={shown(','.join(self.ignored))}")
        if self.reason:
            parts.append(f"reason={shown(self.reason)}")
        return " ".join(parts)


_current: ContextVar[Access] = ContextVar("graftlm_access")


def current() -> Access:
    """Return the record of the request that this task handles; an empty one outside of requests."""
    return _current.get(Access("", ""))


def access_of(scope: MutableMapping[str, Any]) -> Access:
    """Return the record of a request; an empty one for an application that is called without the gate."""
    found = scope.get("graftlm.access")
    if found is None:
        client = scope.get("client") or ("",)
        found = scope["graftlm.access"] = Access("", str(client[0]))
    assert isinstance(found, Access)
    return found


class LineFormatter(logging.Formatter):
    """A formatter that keeps each message on its line; the lines of a traceback are indented and escaped."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        text = super().formatException(ei)
        return "\n".join("    " + printable(line) for line in text.splitlines())
