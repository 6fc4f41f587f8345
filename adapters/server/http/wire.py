"""Envelope: the fields that all objects of one answer share; and the bytes of a server-sent event."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii
from typing import Any

from graftlm.core.request import Usage

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"


def escaped(text: str) -> bytes:
    """Return a text as JSON in ASCII, so that Unicode's line separators cannot break an event."""
    return encode_basestring_ascii(text).encode()


def event(value: Any) -> bytes:
    """Return one server-sent event."""
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


@dataclass
class Envelope:
    """`id`, `created` and `model` of one answer, and the name of its chunks."""

    id: str
    model: str
    object: str
    with_usage: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    _heads: dict[tuple[int, bytes], tuple[bytes, bytes]] = field(default_factory=dict)

    def of(self, name: str) -> dict[str, Any]:
        return {"id": self.id, "object": name, "created": self.created, "model": self.model}

    def chunk(self, choice: dict[str, Any], usage: Usage | None = None) -> bytes:
        """Return a chunk with one choice; `usage` is the count so far, if each chunk reports it."""
        beside = {"usage": usage_of([usage]) if usage is not None else None} if self.with_usage or usage else {}
        return event({**self.of(self.object), "choices": [choice], **beside})

    def usage(self, usages: Iterable[Usage]) -> bytes:
        """Return the chunk that contains only token counts."""
        return event({**self.of(self.object), "choices": [], "usage": usage_of(usages)})

    def around(self, index: int, before: bytes, after: bytes) -> tuple[bytes, bytes]:
        """Return the bytes of a chunk with one choice before and after its text, to be cached by the caller."""
        found = self._heads.get((index, before))
        if found is None:
            head = json.dumps(self.of(self.object), separators=(",", ":")).encode()[:-1]
            tail = b'}],"usage":null}\n\n' if self.with_usage else b"}]}\n\n"
            head = b"data: " + head + b',"choices":[{"index":%d,' % index + before
            found = self._heads[index, before] = head, after + tail
        return found


def usage_of(usages: Iterable[Usage]) -> dict[str, Any]:
    """Return token counts in OpenAI's form; forced tokens have a key of their own."""
    total = sum(usages, Usage())
    return {
        "prompt_tokens": total.prompt_tokens,
        "completion_tokens": total.completion_tokens,
        "total_tokens": total.total_tokens,
        "prompt_tokens_details": {"cached_tokens": total.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": total.reasoning_tokens},
        "graftlm": {"forced_tokens": total.forced_tokens},
    }
