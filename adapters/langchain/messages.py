"""Translation of LangChain messages to native messages, and of completions to LangChain messages."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    InvalidToolCall,
    SystemMessage,
    ToolCall as LangChainToolCall,
    ToolMessage,
)
from langchain_core.messages.ai import UsageMetadata
from langchain_core.messages.tool import tool_call_chunk
from pydantic import model_validator

from graftlm.core.chat.messages import ContentPart, Message, TextPart, ToolCall, media_part
from graftlm.core.chat.tool_parser import NO_NAME, ParsedAnswer, ToolDelta, read_arguments
from graftlm.core.errors import ConfigError
from graftlm.core.request import Completion, TokenLogprob, Usage

_NOT_FOR_THE_MODEL = frozenset(
    ("tool_use", "tool_call", "tool_call_chunk", "invalid_tool_call", "input_json_delta", "thinking", "reasoning")
    + ("redacted_thinking", "non_standard", "server_tool_call", "server_tool_call_chunk", "server_tool_result")
)
"""Types of an assistant's content blocks that are not sent: `tool_calls` has them, or models do not read them back."""


def native_messages(messages: Iterable[BaseMessage]) -> list[Message]:
    """Translate a conversation. Raises ConfigError, naming the message's index, for content no model here can read."""
    native: list[Message] = []
    for index, message in enumerate(messages):
        native.extend(_native(message, index))
    return native


def _native(message: BaseMessage, index: int) -> list[Message]:
    match message:
        case HumanMessage():
            results, rest = _split_tool_results(message.content)
            told = [_tool_result(block, index) for block in results]
            if results and not rest:
                return told
            return [*told, Message("user", _content(rest, index), name=message.name)]
        case AIMessage():
            calls = tuple(ToolCall(c["id"] or "", c["name"], dict(c["args"])) for c in message.tool_calls)
            thinking = message.additional_kwargs.get("reasoning_content")
            content = _content(message.content, index)
            return [Message("assistant", content, calls, name=message.name, thinking=thinking or "")]
        case SystemMessage():
            return [Message("system", _content(message.content, index), name=message.name)]
        case ToolMessage():
            content = _content(message.content, index)
            return [Message("tool", content, tool_call_id=message.tool_call_id, name=message.name)]
        case FunctionMessage():
            return [Message("tool", _content(message.content, index), name=message.name)]
        case ChatMessage():
            return [Message(message.role, _content(message.content, index), name=message.name)]
        case _:
            raise ConfigError(
                f"message {index} is a {type(message).__name__}, which has no place in a prompt; "
                "use human, ai, system, tool or chat messages"
            )


def _split_tool_results(content: str | list[Any]) -> tuple[list[Mapping[str, Any]], str | list[Any]]:
    """Split human content in Anthropic's format into the results of tools and the remaining content."""
    if isinstance(content, str):
        return [], content
    results = [b for b in content if isinstance(b, Mapping) and b.get("type") == "tool_result"]
    return results, [b for b in content if b not in results] if results else content


def _tool_result(block: Mapping[str, Any], index: int) -> Message:
    return Message("tool", _content(block.get("content") or "", index), tool_call_id=block.get("tool_use_id"))


def _content(content: str | Sequence[Any], index: int) -> str | tuple[ContentPart, ...]:
    if isinstance(content, str):
        return content
    parts = [part for block in content for part in _parts(block, index)]
    if all(isinstance(part, TextPart) for part in parts):
        return "".join(part.text for part in parts if isinstance(part, TextPart))
    return tuple(parts)


def _parts(block: Any, index: int) -> list[ContentPart]:
    if isinstance(block, str):
        return [TextPart(block)]
    kind = block.get("type")
    match block:
        case {"type": "text", "text": str(text)}:
            return [TextPart(text)]
        case {"type": "json", "json": value} | {"type": "json", "value": value}:
            return [TextPart(json.dumps(value, ensure_ascii=False))]
    if kind in _NOT_FOR_THE_MODEL:
        return []
    if kind is None and isinstance(block.get("text"), str):
        return [TextPart(block["text"])]
    if (media := media_part(block, f"message {index}")) is not None:
        return [media]
    raise ConfigError(
        f"message {index} holds a content block of type {kind!r}; models here read text, images and videos: remove it"
    )


def usage_metadata(usage: Usage) -> UsageMetadata:
    """Return token counts in LangChain's form; `cache_read` counts the prompt tokens from the radix tree."""
    metadata = UsageMetadata(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
        input_token_details={"cache_read": usage.cached_tokens},
    )
    if usage.reasoning_tokens:
        metadata["output_token_details"] = {"reasoning": usage.reasoning_tokens}
    return metadata


def logprobs_content(logprobs: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
    """Return log-probabilities in the form of the OpenAI API; forced tokens have 0."""
    if logprobs is None:
        return None
    return {"content": [one.to_openai() for one in logprobs]}


def response_metadata(
    model_name: str, finish_reason: str | None, logprobs: Sequence[TokenLogprob] | None, usage: Usage | None = None
) -> dict[str, Any]:
    metadata: dict[str, Any] = {"model_name": model_name, "model_provider": "graftlm", "finish_reason": finish_reason}
    if logprobs is not None:
        metadata["logprobs"] = logprobs_content(logprobs)
    if usage is not None:
        metadata["forced_tokens"] = usage.forced_tokens
    return metadata


def ai_message(completion: Completion, tool_text: ParsedAnswer, model_name: str, usage: Usage | None) -> AIMessage:
    """Build the answer. `usage` is None for all but the first of n answers: the prompt is counted once."""
    finish_reason = "tool_calls" if tool_text.calls else completion.finish_reason
    return AIMessage(
        content=tool_text.content,
        additional_kwargs={"reasoning_content": tool_text.thinking} if tool_text.thinking else {},
        tool_calls=[
            LangChainToolCall(name=c.name, args=c.arguments, id=c.id, type="tool_call") for c in tool_text.calls
        ],
        invalid_tool_calls=[
            InvalidToolCall(name=c.name, args=c.arguments, id=c.id, error=c.error, type="invalid_tool_call")
            for c in tool_text.invalid
        ],
        usage_metadata=usage_metadata(usage) if usage is not None else None,
        response_metadata=response_metadata(model_name, finish_reason, completion.logprobs, completion.usage),
    )


class _Message(AIMessageChunk):
    """LangChain makes a message of a chunk by calling the first parent of the chunk's class; this one returns it."""

    def __new__(cls, **values: Any) -> Any:
        return AIMessage(**values) if cls is _Message else super().__new__(cls)


class StreamedMessage(_Message):
    """A chunk whose sum ends with the calls of `ai_message`.

    LangChain completes the arguments that a sum of chunks has so far, which makes a valid call of one that was cut. In
    the last chunk the calls are whole: those that cannot be read are invalid, with the reason.
    """

    @classmethod
    def lc_id(cls) -> list[str]:
        return AIMessageChunk.lc_id()

    @model_validator(mode="after")
    def _check_calls(self) -> Self:
        if self.chunk_position != "last":
            return self
        valid, invalid = [], []
        for chunk in self.tool_call_chunks:
            name, text, call_id = chunk["name"] or "", chunk["args"] or "", chunk["id"]
            arguments, error = read_arguments(text) if name else ({}, NO_NAME)
            if error:
                invalid.append(InvalidToolCall(name=name, args=text, id=call_id, error=error, type="invalid_tool_call"))
            else:
                valid.append(LangChainToolCall(name=name, args=arguments, id=call_id, type="tool_call"))
        self.tool_calls, self.invalid_tool_calls = valid, invalid
        if invalid and isinstance(self.content, list):  # blocks of output_version="v1"
            unread = {call["id"]: call for call in invalid}
            self.content = [
                {**unread[block["id"]]} if isinstance(block, dict) and block.get("id") in unread else block
                for block in self.content
            ]
        return self


def message_chunk(delta: ToolDelta) -> AIMessageChunk:
    """Return one piece of a streamed answer: text, or the start or a part of a tool call."""
    if delta.index is None:
        return StreamedMessage(content=delta.text)
    chunk = tool_call_chunk(name=delta.name, args=delta.text, id=delta.id, index=delta.index)
    return StreamedMessage(content="", tool_call_chunks=[chunk])
