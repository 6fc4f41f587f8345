"""ResponseStore: the responses that a later request may continue, retrieve or cancel."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from graftlm.adapters.server.http.errors import ApiError

if TYPE_CHECKING:
    from graftlm.adapters.server.intake import Answer

MAX_RESPONSES = 10_000
MAX_BYTES = 64 << 20


@dataclass
class Stored:
    """One response.

    caller    the namespace of its caller; no other caller finds it
    response  its object, in its current status
    messages  the conversation before its output, without instructions
    items     the input items, as they came
    answer    the running requests; None once it has ended
    deleted   True after its caller has deleted it
    """

    caller: str
    response: dict[str, Any]
    messages: list[dict[str, Any]]
    items: list[dict[str, Any]] = field(default_factory=list)
    answer: Answer | None = None
    deleted: bool = False
    num_bytes: int = 0


class ResponseStore:
    """Responses in memory, bounded by their number and bytes; the oldest one is dropped first. Runs on the loop."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self.num_bytes = 0
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._stored: OrderedDict[str, Stored] = OrderedDict()

    def __len__(self) -> int:
        return len(self._stored)

    def get(self, response_id: str, caller: str) -> Stored:
        """Return a response. Raises ApiError with status 404 for an id that this caller does not have."""
        found = self._stored.get(response_id)
        if found is None or found.caller != caller:
            message = f"the response {response_id!r} does not exist here, or was dropped; send its messages as input"
            raise ApiError(404, message, param="previous_response_id", code="previous_response_not_found")
        return found

    def put(self, response_id: str, stored: Stored) -> None:
        """Keep a response, or its new status."""
        self.drop(response_id)
        stored.num_bytes = len(json.dumps([stored.response, stored.messages, stored.items]))
        self._stored[response_id] = stored
        self.num_bytes += stored.num_bytes
        while len(self._stored) > self._max_responses or self.num_bytes > self._max_bytes:
            oldest = next(iter(self._stored))
            self.drop(oldest)

    def drop(self, response_id: str) -> None:
        found = self._stored.pop(response_id, None)
        if found is not None:
            self.num_bytes -= found.num_bytes
