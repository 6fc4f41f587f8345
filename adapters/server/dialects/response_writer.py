"""The answer of `/v1/responses`: one response object, or its events."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from graftlm.adapters.server.dialects.response_tools import Origin, call_item
from graftlm.adapters.server.dialects.responses import ResponsesBody
from graftlm.adapters.server.dialects.stream import Call, Item, ItemReader, Piece, Thought, items_of, named_event
from graftlm.adapters.server.http.errors import ApiError
from graftlm.adapters.server.http.responses import EVENTS
from graftlm.adapters.server.http.wire import PING
from graftlm.core.chat.tool_format import ToolFormat
from graftlm.core.request import Chunk, Completion, Request, TokenLogprob, Usage


class ResponseWriter:
    """A writer of one response. Each request needs its own: a stream keeps its state in it.

    on_end  called with the final response object
    """

    headers = EVENTS
    ping = PING

    def __init__(
        self, body: ResponsesBody, model: str, form: ToolFormat | None, request: Request, on_end: Callable[..., None]
    ) -> None:
        response_id = f"resp_{secrets.token_hex(24)}"
        self._form = form
        self._thinking = request.thinking
        self._on_end = on_end
        self._head = {"id": response_id, "object": "response", "created_at": int(time.time()), "model": model}
        self._echoed = body.echoed()
        self._origins = body.read_tools.origins
        self._reader = ItemReader(form, request.thinking)
        self._ids: list[str] = []
        self._logprobs: list[TokenLogprob] | None = None
        self._number = 0
        self._last: Chunk | None = None

    def status(self, status: str, output: Sequence[Any] = (), **beside: Any) -> dict[str, Any]:
        """Return the response object in a status, with the items of its output."""
        given = {"status": status, "output": list(output), "error": None, "incomplete_details": None, "usage": None}
        return {**self._head, **self._echoed, **given, **beside}

    def whole(self, completions: list[Completion]) -> dict[str, Any]:
        (done,) = completions
        items = items_of(self._form, self._thinking, done)
        state = "incomplete" if done.finish_reason == "length" else "completed"
        output = []
        for index, item in enumerate(items):
            logprobs = done.logprobs if isinstance(item, str) else None
            output.append(self._item(index, item, state if index == len(items) - 1 else "completed", logprobs))
        return self._end(output, done.finish_reason, done.usage)

    def pieces(self, number: int, chunk: Chunk) -> Iterator[bytes]:
        if not self._number:
            yield self._event("response.created", response=self.status("in_progress"))
            yield self._event("response.in_progress", response=self.status("in_progress"))
        self._last = chunk
        if chunk.logprobs is not None:
            self._logprobs = [*(self._logprobs or ()), *chunk.logprobs]
        logprobs = [_logprob(one) for one in chunk.logprobs or ()]
        for piece in self._reader.read(chunk):
            if piece.opens:
                yield from self._close(piece.index - 1)
                yield from self._open(piece)
            yield from self._delta(piece, logprobs)
            logprobs = [] if isinstance(piece.item, str) else logprobs

    def _delta(self, piece: Piece, logprobs: list[dict[str, Any]]) -> Iterator[bytes]:
        if not piece.delta:
            return
        at = {"item_id": self._ids[piece.index], "output_index": piece.index, "delta": piece.delta}
        if isinstance(piece.item, str):
            yield self._event("response.output_text.delta", **at, content_index=0, logprobs=logprobs)
        elif isinstance(piece.item, Thought):
            yield self._event("response.reasoning_text.delta", **at, content_index=0)
        elif not self._is_custom(piece.item):  # the text of a custom tool is read from the whole arguments
            yield self._event("response.function_call_arguments.delta", **at)

    def ended(self, number: int, completion: Completion) -> Iterator[bytes]:
        return iter(())

    def end(self, completions: Sequence[Completion]) -> bytes:
        (done,) = completions
        written: list[bytes] = []
        for piece in self._reader.end():
            written += [*self._close(piece.index - 1), *self._open(piece)]
        last = len(self._reader.items) - 1
        state = "incomplete" if done.finish_reason == "length" else "completed"
        written += self._close(last, state)
        items = self._reader.items
        output = [self._written(index, state if index == last else "completed") for index in range(len(items))]
        response = self._end(output, done.finish_reason, done.usage)
        return b"".join([*written, self._event(f"response.{response['status']}", response=response)])

    def failed(self, error: ApiError) -> bytes:
        """Return `response.failed` with the items so far."""
        output = [self._written(index, "incomplete") for index in range(len(self._ids))]
        told = {"code": error.error["code"] or "server_error", "message": error.error["message"]}
        response = self.status("failed", output, error=told)
        self._on_end(response)
        return self._event("response.failed", response=response)

    def _end(self, output: list[dict[str, Any]], reason: str, usage: Usage) -> dict[str, Any]:
        cut = reason == "length"
        details = {"reason": "max_output_tokens"} if cut else None
        response = self.status(
            "incomplete" if cut else "completed", output, incomplete_details=details, usage=_usage_of(usage)
        )
        self._on_end(response)
        return response

    def _open(self, piece: Piece) -> Iterator[bytes]:
        """Yield the events that begin an item."""
        item: Item = Call(piece.item.id, piece.item.name) if isinstance(piece.item, Call) else type(piece.item)()
        shown = self._item(piece.index, item, "in_progress", None)
        parts = shown.pop("content", None)
        listed = shown if parts is None else {**shown, "content": []}
        yield self._event("response.output_item.added", output_index=piece.index, item=listed)
        if parts is not None:
            at = {"item_id": shown["id"], "output_index": piece.index, "content_index": 0}
            yield self._event("response.content_part.added", **at, part=parts[0])

    def _close(self, index: int, state: str = "completed") -> Iterator[bytes]:
        """Yield the events that end item `index`; none below 0."""
        if index < 0:
            return
        item = self._written(index, state)
        at = {"item_id": item["id"], "output_index": index}
        if item["type"] == "custom_tool_call":
            yield self._event("response.custom_tool_call_input.delta", **at, delta=item["input"])
            yield self._event("response.custom_tool_call_input.done", **at, input=item["input"])
        elif item["type"] == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield self._event("response.function_call_arguments.done", **at, **done)
        else:
            (part,) = item["content"]
            done = {name: part[name] for name in ("text", "logprobs") if name in part}
            yield self._event(f"response.{part['type']}.done", **at, content_index=0, **done)
            yield self._event("response.content_part.done", **at, content_index=0, part=part)
        yield self._event("response.output_item.done", output_index=index, item=item)

    def _written(self, index: int, state: str) -> dict[str, Any]:
        item = self._reader.items[index]
        return self._item(index, item, state, self._logprobs if isinstance(item, str) else None)

    def _item(self, index: int, item: Item, status: str, logprobs: Sequence[TokenLogprob] | None) -> dict[str, Any]:
        origin = self._origins.get(item.name) if isinstance(item, Call) else None
        return _item(item, self._id(index, item), status, logprobs, origin)

    def _is_custom(self, call: Call) -> bool:
        origin = self._origins.get(call.name)
        return origin is not None and origin.custom

    def _id(self, index: int, item: Item) -> str:
        while len(self._ids) <= index:
            self._ids.append(_PREFIXES[type(item)] + secrets.token_hex(12))
        return self._ids[index]

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return named_event(kind, {"type": kind, "sequence_number": self._number - 1, **fields})


_PREFIXES = {str: "msg_", Thought: "rs_", Call: "fc_"}


def _item(
    item: Item, item_id: str, status: str, logprobs: Sequence[TokenLogprob] | None, origin: Origin | None
) -> dict[str, Any]:
    if isinstance(item, Thought):
        part = {"type": "reasoning_text", "text": item.text}
        return {"id": item_id, "type": "reasoning", "summary": [], "status": status, "content": [part]}
    if isinstance(item, str):
        part = _part(item, [_logprob(one) for one in logprobs or ()])
        return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": [part]}
    if status == "completed" and not item.valid:
        status = "incomplete"
    return {"id": item_id, "status": status, "call_id": item.id, **call_item(origin, item.name, item.arguments)}


def _part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _logprob(one: TokenLogprob) -> dict[str, Any]:
    return one.to_openai()


def _usage_of(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
