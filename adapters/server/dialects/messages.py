"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's Messages API, as a chat request."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from graftlm.adapters.server.dialects.stream import (
    Call,
    Item,
    ItemReader,
    Piece,
    Thought,
    items_of,
    named_event,
    object_of,
)
from graftlm.adapters.server.endpoints.chat import ChatBody
from graftlm.adapters.server.http.errors import ApiError
from graftlm.adapters.server.http.responses import EVENTS
from graftlm.core.chat.messages import list_of, media_part
from graftlm.core.chat.thinking import Thinking
from graftlm.core.chat.tool_format import ToolFormat
from graftlm.core.errors import ConfigError
from graftlm.core.request import Chunk, Completion, FinishReason, Usage


class CountBody(BaseModel):
    """The body of `count_tokens`, and the part of a message's body that the prompt is made of."""

    model_config = ConfigDict(extra="forbid")

    messages: list[dict[str, Any]] = Field(min_length=1)
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None

    thinking: dict[str, Any] | None = None

    # Accepted without an effect: every prefix is cached, and a prompt that is too long is an error.
    cache_control: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    speed: str | None = None

    def to_messages(self) -> list[dict[str, Any]]:
        """Return the messages in the form of chat completions. Raises ConfigError with a message's index."""
        system = [{"role": "system", "content": _text(self.system, "system")}] if self.system else []
        return [*system, *(turn for index, message in enumerate(self.messages) for turn in _turns(message, index))]

    def to_tools(self) -> list[dict[str, Any]] | None:
        tools = [_tool(tool, index) for index, tool in enumerate(self.tools or ()) if not _hosted(tool)]
        return tools or None

    @property
    def ignored(self) -> list[str]:
        """The paths of the tools that are left out, and `context_management` where it is given."""
        tools = [f"tools[{i}].{tool['type']}" for i, tool in enumerate(self.tools or ()) if _hosted(tool)]
        return [*tools, *(["context_management"] if self.context_management else [])]

    def thinking_fields(self) -> dict[str, Any]:
        """Return `thinking` as fields of a chat request; without it the model thinks as its chat template says."""
        match self.thinking:
            case None:
                return {}
            case {"type": "enabled" | "adaptive"}:
                return {"enable_thinking": True, "thinking_budget": self.thinking.get("budget_tokens")}
            case {"type": "disabled"}:
                return {"enable_thinking": False}
        raise ConfigError(f"thinking is {str(self.thinking)[:80]}; give its type as enabled, adaptive or disabled")

    def schema_format(self) -> dict[str, Any] | None:
        """Return the schema of the answer as a `response_format`."""
        given = self.output_format or (self.output_config or {}).get("format")
        if given is None:
            return None
        schema = given.get("schema") if isinstance(given, Mapping) and given.get("type") == "json_schema" else None
        if not isinstance(schema, Mapping):
            raise ConfigError("output_config.format must be {'type': 'json_schema', 'schema': {...}}")
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


class MessagesBody(CountBody):
    """The body of a message. An unknown field is refused with its name."""

    max_tokens: int = Field(ge=1)
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None

    # Accepted without an effect.
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None

    def to_chat(self) -> ChatBody:
        """Return the chat request. Raises ConfigError or pydantic's ValidationError."""
        messages = self.to_messages()
        continued = messages[-1]["role"] == "assistant"
        parallel = (self.tool_choice or {}).get("disable_parallel_tool_use") is not True
        return ChatBody(
            model=self.model,
            messages=messages,
            stream=bool(self.stream),
            max_completion_tokens=self.max_tokens,
            stop=self.stop_sequences or None,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            response_format=self.schema_format(),
            tools=self.to_tools(),
            tool_choice=self.tool_choice if self.tools else None,
            parallel_tool_calls=parallel,
            reasoning_effort=(self.output_config or {}).get("effort"),
            add_generation_prompt=not continued,
            continue_final_message=continued,
            **self.thinking_fields(),
        )


def _turns(message: Mapping[str, Any], index: int) -> Iterator[dict[str, Any]]:
    """Yield one message as chat messages: results of tools come first, each as a message of its own."""
    where, role, content = f"messages[{index}]", message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise ConfigError(f"{where} has role {role!r}; give user or assistant")
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    if not isinstance(content, list):
        raise ConfigError(f"{where} has no content; give text or a list of blocks")
    parts: list[dict[str, Any]] = []
    calls, results, thought = [], [], ""
    for block in content:
        match block:
            case {"type": "text", "text": str(text)}:
                parts.append({"type": "text", "text": text})
            case {"type": "image" | "image_url"} if media_part(block, where) is not None:
                parts.append(block)
            case {"type": "tool_use", "name": str(name)} if role == "assistant":
                function = {"name": name, "arguments": json.dumps(block.get("input") or {}, ensure_ascii=False)}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case {"type": "tool_result", "tool_use_id": str(call_id)} if role == "user":
                result = _result(block, where)
                results.append({"role": "tool", "tool_call_id": call_id, "content": result})
            case {"type": "thinking", "thinking": str(text)} if role == "assistant":
                thought += text
            case {"type": "redacted_thinking"}:
                pass  # only its writer can read it
            case _:
                kind = block.get("type") if isinstance(block, Mapping) else type(block).__name__
                raise ConfigError(
                    f"{where} has a block of type {kind!r}; blocks are text, image, tool_use, tool_result"
                )
    yield from results
    if parts or calls or not results:
        plain = all(part["type"] == "text" for part in parts)
        whole: Any = "".join(part["text"] for part in parts) if plain else parts
        yield {"role": role, "content": whole, **({"tool_calls": calls} if calls else {}), "reasoning": thought}


def _text(content: Any, where: str) -> str:
    """Return the text of blocks. Raises ConfigError for a block that is no text."""
    if isinstance(content, str):
        return content
    for block in content:
        if not isinstance(block, Mapping) or not isinstance(block.get("text"), str):
            raise ConfigError(f"{where} has the block {str(block)[:80]}; only text blocks are read there")
    return "\n".join(block["text"] for block in content)


def _result(block: Mapping[str, Any], where: str) -> str | list[Any]:
    """Return the content of a tool's result: text, or parts if there are pictures among them."""
    content = block.get("content") or ""
    blocks = [] if isinstance(content, str) else list_of(content, where, "content")
    pictures = [one for one in blocks if isinstance(one, Mapping) and media_part(one, where) is not None]
    text = _text(content if isinstance(content, str) else [one for one in blocks if one not in pictures], where)
    text = f"Error: {text}" if block.get("is_error") else text
    return [{"type": "text", "text": text}, *pictures] if pictures else text


_HOSTED = re.compile(
    r"(advisor|bash|code_execution|computer|mcp_toolset|memory|text_editor|tool_search_tool\w*|web_fetch|web_search)(_\d{8})?"
)
"""Types of tools without a schema: Anthropic's servers run them, or its models are trained on their calls."""


def _hosted(tool: Mapping[str, Any]) -> bool:
    return _HOSTED.fullmatch(str(tool.get("type"))) is not None and "input_schema" not in tool


def _tool(tool: Mapping[str, Any], index: int) -> dict[str, Any]:
    if tool.get("type", "custom") != "custom" or not isinstance(tool.get("name"), str):
        raise ConfigError(
            f"tools[{index}] has type {tool.get('type')!r}; this server calls tools with a name and an input_schema"
        )
    if not isinstance(tool.get("input_schema"), Mapping):
        raise ConfigError(f"tools[{index}] has no input_schema; give the JSON schema of its arguments")
    function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": tool["input_schema"]}
    return {"type": "function", "function": function}


class MessageWriter:
    """A writer of one message. Each request needs its own: a stream keeps its state in it."""

    headers = EVENTS
    ping = named_event("ping", {"type": "ping"})
    _REASONS: ClassVar[dict[FinishReason, str]] = {"length": "max_tokens"}

    def __init__(self, message_id: str, model: str, form: ToolFormat | None, thinking: Thinking | None = None) -> None:
        self._form = form
        self._thinking = thinking
        self._head = {"id": message_id, "type": "message", "role": "assistant", "model": model}
        self._reader = ItemReader(form, thinking)
        self._begun = False

    def whole(self, completions: list[Completion]) -> dict[str, Any]:
        (done,) = completions
        items = items_of(self._form, self._thinking, done)
        called = any(isinstance(item, Call) and item.valid for item in items)
        content = [_block(item) for item in items]
        return {**self._head, "content": content, **self._stop(done, called), "usage": _usage_of(done.usage)}

    def pieces(self, number: int, chunk: Chunk) -> Iterator[bytes]:
        if not self._begun:
            self._begun = True
            begun: dict[str, Any] = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None}
            yield _event("message_start", message={**begun, "usage": _usage_of(chunk.usage or Usage())})
        for piece in self._reader.read(chunk):
            yield from self._written(piece)

    def _written(self, piece: Piece) -> Iterator[bytes]:
        if piece.opens:
            if piece.index:
                yield _event("content_block_stop", index=piece.index - 1)
            empty = Call(piece.item.id, piece.item.name) if isinstance(piece.item, Call) else type(piece.item)()
            yield _event("content_block_start", index=piece.index, content_block=_block(empty))
        if piece.delta:
            kind, name = _DELTAS[type(piece.item)]
            yield _event("content_block_delta", index=piece.index, delta={"type": kind, name: piece.delta})

    def ended(self, number: int, completion: Completion) -> Iterator[bytes]:
        return iter(())

    def end(self, completions: Sequence[Completion]) -> bytes:
        (done,) = completions
        written = [event for piece in self._reader.end() for event in self._written(piece)]
        written.append(_event("content_block_stop", index=len(self._reader.items) - 1))
        delta = self._stop(done, self._reader.called)
        written.append(_event("message_delta", delta=delta, usage=_usage_of(done.usage)))
        return b"".join([*written, _event("message_stop")])

    def failed(self, error: ApiError) -> bytes:
        return named_event("error", error_object(error))

    def _stop(self, done: Completion, called: bool) -> dict[str, Any]:
        sequence = done.stop if isinstance(done.stop, str) else None
        if called and done.finish_reason != "length":
            return {"stop_reason": "tool_use", "stop_sequence": None}
        reason = "stop_sequence" if sequence is not None else self._REASONS.get(done.finish_reason, "end_turn")
        return {"stop_reason": reason, "stop_sequence": sequence}


_ERRORS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}


def error_object(error: ApiError) -> dict[str, Any]:
    """Return an error in Anthropic's form."""
    kind = _ERRORS.get(error.status) or ("overloaded_error" if error.status == 503 else "api_error")
    kind = "invalid_request_error" if error.status in (400, 405, 415) else kind
    return {"type": "error", "error": {"type": kind, "message": error.error["message"]}}


def _event(kind: str, **fields: Any) -> bytes:
    return named_event(kind, {"type": kind, **fields})


_DELTAS = {
    str: ("text_delta", "text"),
    Thought: ("thinking_delta", "thinking"),
    Call: ("input_json_delta", "partial_json"),
}
"""Type and field of the deltas of each kind of item."""


def _block(item: Item) -> dict[str, Any]:
    if isinstance(item, Thought):
        return {"type": "thinking", "thinking": item.text, "signature": ""}
    if isinstance(item, Call):
        return {"type": "tool_use", "id": item.id, "name": item.name, "input": object_of(item)}
    return {"type": "text", "text": item}


def _usage_of(usage: Usage) -> dict[str, Any]:
    """Return token counts; those of the prompt are split into cached and computed ones."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }
