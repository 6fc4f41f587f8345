"""Ollama's API: `/api/chat` and `/api/generate` as chat requests, and the routes that describe the model."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from graftlm.adapters.server.dialects.stream import Call, ItemReader, Thought, items_of, object_of
from graftlm.adapters.server.endpoints.chat import ChatBody
from graftlm.adapters.server.http.errors import ApiError
from graftlm.core.chat.messages import data_url, list_of, objects_of
from graftlm.core.chat.thinking import Thinking
from graftlm.core.chat.tool_format import ToolFormat
from graftlm.core.errors import ConfigError
from graftlm.core.request import Chunk, Completion

_SAME = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "seed": "seed",
    "stop": "stop",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repeat_penalty": "repetition_penalty",
}
_OF_THE_SERVER = frozenset(
    ("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "use_mmap", "use_mlock", "numa")
    + ("low_vram", "f16_kv", "vocab_only")
)
"""Options that tell Ollama how to load a model: accepted without an effect, as the model is loaded."""
_NEUTRAL = {"mirostat": 0, "typical_p": 1, "tfs_z": 1, "repeat_last_n": -1}
"""Options of samplers that do not exist here, each with the value that has no effect."""


class OllamaBody(BaseModel):
    """The fields that both generating routes share. An unknown field is refused with its name."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    stream: bool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    logprobs: Literal[False] | None = None
    top_logprobs: Literal[0] | None = None

    think: bool | str | None = None

    # Accepted without an effect: the model stays loaded.
    keep_alive: float | str | None = None
    truncate: bool | None = None
    shift: bool | None = None

    @property
    def streams(self) -> bool:
        return self.stream is not False

    def chat_fields(self) -> dict[str, Any]:
        """Return sampling and format as fields of a chat request. Raises ConfigError for an unknown option."""
        fields: dict[str, Any] = {"model": self.model, "stream": self.streams}
        if self.think is not None:
            thinks = isinstance(self.think, bool)
            fields |= {"enable_thinking": self.think} if thinks else {"reasoning_effort": self.think}
        for name, value in (self.options or {}).items():
            if name == "num_predict":
                if not isinstance(value, int):
                    raise ConfigError(f"options.num_predict is {str(value)[:80]}; give a whole number")
                fields["max_tokens"] = value if value > 0 else None
            elif name in _SAME:
                fields[_SAME[name]] = value
            elif name not in _OF_THE_SERVER and _NEUTRAL.get(name) != value:
                known = ", ".join(["num_predict", *_SAME])
                raise ConfigError(f"options.{name} is unknown here; leave it out, known: {known}")
        if self.format == "json":
            fields["response_format"] = {"type": "json_object"}
        elif isinstance(self.format, dict):
            fields["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": self.format},
            }
        return fields


class OllamaChatBody(OllamaBody):
    """The body of `/api/chat`."""

    messages: list[dict[str, Any]] = Field(default_factory=list)
    tools: list[dict[str, Any]] | None = None

    def to_chat(self) -> ChatBody | None:
        """Return the chat request; None without messages, which only loads the model."""
        if not self.messages:
            return None
        ids: list[str] = []
        messages = [_message(message, index, ids) for index, message in enumerate(self.messages)]
        return ChatBody(messages=messages, tools=self.tools or None, **self.chat_fields())


class GenerateBody(OllamaBody):
    """The body of `/api/generate`."""

    prompt: str = ""
    system: str | None = None
    images: list[str] | None = None
    suffix: Literal[""] | None = None
    template: Literal[""] | None = None
    raw: Literal[False] | None = None
    context: list[int] | None = Field(default=None, max_length=0)

    def to_chat(self) -> ChatBody | None:
        """Return the chat request; None without a prompt, which only loads the model."""
        if not self.prompt:
            return None
        user: dict[str, Any] = {
            "role": "user",
            "content": self.prompt,
            **({"images": self.images} if self.images else {}),
        }
        system = [{"role": "system", "content": self.system}] if self.system else []
        return ChatBody(messages=[_message(one, 0, []) for one in [*system, user]], **self.chat_fields())


class ShowBody(BaseModel):
    """The body of `/api/show`."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None


def _message(message: Mapping[str, Any], index: int, ids: list[str]) -> dict[str, Any]:
    """Return a message in the form of chat completions.

    ids  the ids of calls without a result so far: Ollama's calls have none, so results follow in their order
    """
    unknown = message.keys() - {"role", "content", "images", "tool_calls", "tool_name", "name", "thinking"}
    unknown -= {"tool_call_id"}
    if unknown:
        raise ConfigError(f"messages[{index}] has the field {min(unknown)!r}, which is unknown here; leave it out")
    found: dict[str, Any] = {"role": message.get("role"), "content": message.get("content") or ""}
    found["reasoning"] = message.get("thinking")
    where = f"messages[{index}]"
    if images := list_of(message.get("images"), where, "images"):
        urls = [{"type": "image_url", "image_url": {"url": data_url(one, None, "image", where)}} for one in images]
        found["content"] = [*urls, {"type": "text", "text": found["content"]}]
    if calls := objects_of(message.get("tool_calls"), where, "tool_calls"):
        found["tool_calls"] = [
            {
                "id": str(call.get("id") or f"call{index:04}{number:01}"),
                "type": "function",
                "function": call.get("function"),
            }
            for number, call in enumerate(calls)
        ]
        ids[:] = [call["id"] for call in found["tool_calls"]]
    if message.get("role") == "tool":
        found["tool_call_id"] = message.get("tool_call_id") or (ids.pop(0) if ids else f"call{index:05}")
        found["name"] = message.get("tool_name") or message.get("name")
    return found


class OllamaWriter:
    """A writer of one answer, as JSON objects a line. Each request needs its own: a stream keeps its state in it.

    chat  True for `/api/chat`, whose answers are messages
    """

    headers: ClassVar = [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-cache")]
    ping = b""

    def __init__(self, model: str, form: ToolFormat | None, thinking: Thinking | None = None, *, chat: bool) -> None:
        self._model = model
        self._form = form
        self._thinking = thinking
        self._chat = chat
        self._reader = ItemReader(form, thinking)
        self._num_sent = 0
        self._begun_s = time.monotonic()
        self._first_s: float | None = None

    def whole(self, completions: list[Completion]) -> dict[str, Any]:
        (done,) = completions
        items = items_of(self._form, self._thinking, done)
        text = "".join(item for item in items if isinstance(item, str))
        thought = "".join(item.text for item in items if isinstance(item, Thought))
        calls = [item for item in items if isinstance(item, Call)]
        return self._line(text, calls, thought, **self._done(done))

    def pieces(self, number: int, chunk: Chunk) -> Iterator[bytes]:
        self._first_s = self._first_s or time.monotonic()
        for piece in self._reader.read(chunk):
            if piece.opens:
                yield from self._ready_calls(piece.index)
            if isinstance(piece.item, Thought):
                yield _line(self._line("", (), piece.delta, done=False))
            elif isinstance(piece.item, str) and piece.delta:
                yield _line(self._line(piece.delta, (), done=False))

    def _ready_calls(self, before: int) -> Iterator[bytes]:
        """Yield the calls before item `before` that were not sent: Ollama's clients get a call as a whole."""
        calls = [item for item in self._reader.items[self._num_sent : before] if isinstance(item, Call)]
        self._num_sent = before
        if calls:
            yield _line(self._line("", calls, done=False))

    def ended(self, number: int, completion: Completion) -> Iterator[bytes]:
        return iter(())

    def end(self, completions: Sequence[Completion]) -> bytes:
        (done,) = completions
        return b"".join([*self._ready_calls(len(self._reader.items)), _line(self._line("", (), **self._done(done)))])

    def failed(self, error: ApiError) -> bytes:
        return _line(error_object(error))

    def loaded(self) -> dict[str, Any]:
        """Return the answer to a request without a prompt."""
        return self._line("", (), done=True, done_reason="load")

    def _line(self, text: str, calls: Sequence[Call], thought: str = "", **beside: Any) -> dict[str, Any]:
        head = {"model": self._model, "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z")}
        if not self._chat:
            return {**head, "response": text, **({"thinking": thought} if thought else {}), **beside}
        message: dict[str, Any] = {"role": "assistant", "content": text, **({"thinking": thought} if thought else {})}
        if calls:
            message["tool_calls"] = [
                {"id": call.id, "function": {"index": index, "name": call.name, "arguments": object_of(call)}}
                for index, call in enumerate(calls)
            ]
        return {**head, "message": message, **beside}

    def _done(self, done: Completion) -> dict[str, Any]:
        """Return the fields of the last line; durations in nanoseconds."""
        now, first = time.monotonic(), self._first_s or time.monotonic()
        return {
            "done": True,
            "done_reason": done.finish_reason if done.finish_reason == "length" else "stop",
            "total_duration": int((now - self._begun_s) * 1e9),
            "load_duration": 0,
            "prompt_eval_count": done.usage.prompt_tokens,
            "prompt_eval_duration": int((first - self._begun_s) * 1e9),
            "eval_count": done.usage.completion_tokens,
            "eval_duration": int((now - first) * 1e9),
        }


def error_object(error: ApiError) -> dict[str, Any]:
    """Return an error in Ollama's form."""
    return {"error": error.error["message"]}


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"
