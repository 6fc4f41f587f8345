"""Fingerprint: a number by which the prompts of two rounds are told apart, without keeping them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import threading
from collections.abc import Mapping
from typing import Any

_IDS = {"id", "tool_call_id", "request_id"}
"""Names of what clients and servers number anew in every round."""


class Fingerprint:
    """The sum of all prompts' digests: their order does not count, for calls from several threads come in any order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sum: int | None = None

    @property
    def value(self) -> int | None:
        """None where no prompt was added."""
        return self._sum

    def add(self, prompt: Any) -> None:
        """Add one prompt: text, token ids, messages, or a request's body. Ids of messages do not count."""
        text = json.dumps(_plain(prompt), sort_keys=True, default=str)
        digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "little")
        with self._lock:
            self._sum = ((self._sum or 0) + digest) % 2**48


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        try:
            return _plain(json.loads(value))
        except ValueError:
            return repr(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items() if key not in _IDS}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value
