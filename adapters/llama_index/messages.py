"""Translation of LlamaIndex messages to native messages, and of completions to LlamaIndex responses."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from graftlm.core.call_options import hold_for_tools
from graftlm.core.chat.messages import ContentPart, ImagePart, Message, TextPart, ToolCall, VideoPart
from graftlm.core.chat.thinking import Thinking, split_thinking
from graftlm.core.chat.tool_format import ToolFormat
from graftlm.core.chat.tool_parser import AnswerReader, InvalidCall, ParsedAnswer, parse_completion
from graftlm.core.errors import ConfigError
from graftlm.core.request import Chunk, Completion, TokenLogprob, Usage
from graftlm.core.runtime import Runtime
from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    ChatResponse,
    CitableBlock,
    CitationBlock,
    CompletionResponse,
    ImageBlock,
    LogProb,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
    VideoBlock,
)

_ROLES = {
    MessageRole.SYSTEM: "system",
    MessageRole.DEVELOPER: "system",
    MessageRole.USER: "user",
    MessageRole.ASSISTANT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.CHATBOT: "assistant",
    MessageRole.TOOL: "tool",
    MessageRole.FUNCTION: "tool",
}


def native_messages(messages: Iterable[ChatMessage]) -> list[Message]:
    """Translate a conversation. Raises ConfigError, naming the message's index, for blocks no model here can read."""
    return [_native(message, index) for index, message in enumerate(messages)]


def _native(message: ChatMessage, index: int) -> Message:
    if not isinstance(message, ChatMessage):
        raise ConfigError(f"message {index} is a {type(message).__name__}; give a ChatMessage")
    parts: list[ContentPart] = []
    calls: list[ToolCall] = []
    for block in message.blocks:
        if isinstance(block, ToolCallBlock):
            calls.append(ToolCall(block.tool_call_id or "", block.tool_name, _arguments(block.tool_kwargs, index)))
        else:
            parts.extend(_parts(block, index))
    told = message.additional_kwargs
    if not calls:
        calls = [_legacy_call(call, index) for call in told.get("tool_calls") or ()]
    text_only = all(isinstance(part, TextPart) for part in parts)
    content = "\n".join(part.text for part in parts if isinstance(part, TextPart)) if text_only else tuple(parts)
    thinking = "".join(block.content or "" for block in message.blocks if isinstance(block, ThinkingBlock))
    return Message(_ROLES[message.role], content, tuple(calls), told.get("tool_call_id"), told.get("name"), thinking)


def _parts(block: Any, index: int) -> list[ContentPart]:
    match block:
        case TextBlock():
            return [TextPart(block.text)]
        case ThinkingBlock() | CachePoint():
            return []
        case CitableBlock():
            return [part for item in block.content for part in _parts(item, index)]
        case CitationBlock():
            return _parts(block.cited_content, index)
        case ImageBlock():
            return [ImagePart(_media(block, block.image, index), block.image_mimetype, block.detail)]
        case VideoBlock():
            if block.fps is not None:
                raise ConfigError(
                    f"message {index} asks for a video at {block.fps} frames a second, and models here choose the "
                    "frames; leave fps out"
                )
            return [VideoPart(_media(block, block.video, index), mime_type=block.video_mimetype)]
    raise ConfigError(
        f"message {index} holds the block {type(block).__name__}; models here read text, images and videos: remove it"
    )


def _media(block: ImageBlock | VideoBlock, data: Any, index: int) -> Any:
    """Return the bytes of a block, or its path or URL unread. LlamaIndex holds bytes as base64."""
    if data is not None:
        resolved = block.resolve_image() if isinstance(block, ImageBlock) else block.resolve_video()
        return resolved.read()
    if block.path is None and block.url is None:
        raise ConfigError(f"message {index} holds an empty {type(block).__name__}; give its bytes, path or url")
    return block.path or str(block.url)


def _legacy_call(call: Any, index: int) -> ToolCall:
    """Return a call in the form of OpenAI's API, given as a dict or as an object of its client."""
    if not isinstance(call, dict):
        call = call.model_dump()
    function = call.get("function", call)
    return ToolCall(call.get("id") or "", function["name"], _arguments(function.get("arguments"), index))


def _arguments(arguments: Any, index: int) -> dict[str, Any]:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"message {index} calls a tool with arguments that are not JSON: {error}") from error
    if not isinstance(arguments or {}, Mapping):
        raise ConfigError(f"message {index} calls a tool with arguments that are no JSON object: {arguments!r}")
    return dict(arguments or {})


def raw_response(model_name: str, finish_reason: str | None, usage: Usage | None) -> dict[str, Any]:
    """Return the value of `raw`; LlamaIndex's token counter reads its `usage`."""
    raw: dict[str, Any] = {"model": model_name, "finish_reason": finish_reason}
    if usage is not None:
        raw["usage"] = {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.total_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
            "completion_tokens_details": {
                "reasoning_tokens": usage.reasoning_tokens,
                "forced_tokens": usage.forced_tokens,
            },
        }
    return raw


def _counts(usage: Usage | None) -> dict[str, Any]:
    if usage is None:
        return {}
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
    }


def log_probs(logprobs: Sequence[TokenLogprob] | None) -> list[list[LogProb]] | None:
    """Return, per token, the token itself and its likeliest alternatives. Forced tokens have 0."""
    if logprobs is None:
        return None
    return [
        [LogProb(token=one.token, logprob=one.logprob, bytes=list(one.data)) for one in item.candidates]
        for item in logprobs
    ]


INVALID_CALLS = "invalid_tool_calls"
"""The reasons why calls of a message cannot be read, in its `additional_kwargs`."""


def chat_message(text: ParsedAnswer) -> ChatMessage:
    """Return the assistant's message; calls are blocks, and for older readers also in `additional_kwargs`."""
    calls: list[ToolCall | InvalidCall] = [
        *text.calls,
        *text.invalid,
    ]  # an invalid call keeps its arguments as text, which fails to parse later
    blocks: list[Any] = [ThinkingBlock(content=text.thinking)] if text.thinking else []
    blocks += [TextBlock(text=text.content)] if text.content or not calls else []
    blocks += [ToolCallBlock(tool_call_id=c.id, tool_name=c.name, tool_kwargs=c.arguments) for c in calls]
    told: dict[str, Any] = {}
    if calls:
        told["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _written(call.arguments)}}
            for call in calls
        ]
    if text.invalid:
        told[INVALID_CALLS] = [f"the call of tool {c.name!r}: {c.error}; it is {c.arguments!r}" for c in text.invalid]
    return ChatMessage(role=MessageRole.ASSISTANT, blocks=blocks, additional_kwargs=told)


def _written(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def chat_response(
    model_name: str, completion: Completion, form: ToolFormat | None, thinking: Thinking | None, runtime: Runtime
) -> ChatResponse:
    text = parse_completion(form, completion, thinking)
    hold_for_tools(runtime, completion, text.calls)
    reason = "tool_calls" if text.calls else completion.finish_reason
    return ChatResponse(
        message=chat_message(text),
        raw=raw_response(model_name, reason, completion.usage),
        logprobs=log_probs(completion.logprobs),
        additional_kwargs=_counts(completion.usage),
    )


def completion_response(
    model_name: str, completion: Completion, thinking: Thinking | None = None
) -> CompletionResponse:
    """Return a completion without its thinking, for which LlamaIndex's completions have no place."""
    return CompletionResponse(
        text=split_thinking(thinking, completion.text)[1],
        raw=raw_response(model_name, completion.finish_reason, completion.usage),
        logprobs=log_probs(completion.logprobs),
        additional_kwargs=_counts(completion.usage),
    )


class ChatReader:
    """A converter of chunks to ChatResponses, each with the text so far and the new part in `delta`."""

    def __init__(self, model_name: str, form: ToolFormat | None, thinking: Thinking | None = None) -> None:
        self._model_name = model_name
        self._reader = AnswerReader(form, thinking)
        self._content = self._thought = ""

    @property
    def calls(self) -> list[ToolCall]:
        """The complete tool calls so far."""
        return self._reader.calls

    def read(self, chunk: Chunk) -> ChatResponse:
        text = "".join(delta.text for delta in self._reader.read(chunk) if delta.index is None)
        self._content += text
        self._thought += self._reader.thought
        calls, invalid = tuple(self._reader.calls), tuple(self._reader.invalid)
        reason = "tool_calls" if calls and chunk.finish_reason is not None else chunk.finish_reason
        return ChatResponse(
            message=chat_message(ParsedAnswer(self._content, calls, invalid, thinking=self._thought)),
            delta=text,
            raw=raw_response(self._model_name, reason, chunk.usage),
            logprobs=log_probs(chunk.logprobs),
            additional_kwargs=_counts(chunk.usage),
        )


class CompletionReader:
    """A converter of chunks to CompletionResponses, each with the text so far and the new part in `delta`."""

    def __init__(self, model_name: str, thinking: Thinking | None = None) -> None:
        self._model_name = model_name
        self._reader = AnswerReader(None, thinking)
        self._text = ""

    def read(self, chunk: Chunk) -> CompletionResponse:
        text = "".join(delta.text for delta in self._reader.read(chunk))
        self._text += text
        return CompletionResponse(
            text=self._text,
            delta=text,
            raw=raw_response(self._model_name, chunk.finish_reason, chunk.usage),
            logprobs=log_probs(chunk.logprobs),
            additional_kwargs=_counts(chunk.usage),
        )
