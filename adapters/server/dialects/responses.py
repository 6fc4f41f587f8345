"""The body of `/v1/responses`, OpenAI's Responses API, as a chat request."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from graftlm.adapters.server.dialects.response_tools import Origin, ResponseTools
from graftlm.adapters.server.endpoints.chat import ChatBody
from graftlm.core.chat.messages import media_part, objects_of
from graftlm.core.errors import ConfigError

_LOGPROBS = "message.output_text.logprobs"


class Reasoning(BaseModel):
    """`reasoning`: the effort is an argument of the chat template; summaries do not exist."""

    model_config = ConfigDict(extra="forbid")

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class Text(BaseModel):
    """`text`: the format of the answer. `verbosity` has no effect."""

    model_config = ConfigDict(extra="forbid")

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class StreamOptions(BaseModel):
    """`stream_options`: padding of chunks does not exist."""

    model_config = ConfigDict(extra="forbid")

    include_obfuscation: bool | None = None


class ResponsesBody(BaseModel):
    """The body of a response. An unknown field is refused with its name."""

    model_config = ConfigDict(extra="forbid")

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    background: bool | None = None
    store: bool | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    include: list[str] | None = None
    text: Text | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["disabled", "auto"] | None = None
    metadata: dict[str, Any] | None = None

    # Accepted without an effect.
    user: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    max_tool_calls: int | None = None
    client_metadata: dict[str, Any] | None = None

    @cached_property
    def read_tools(self) -> ResponseTools:
        """The tools as functions of the chat. Raises ConfigError with a tool's index."""
        return ResponseTools.read(self.tools or ())

    def to_messages(self) -> list[dict[str, Any]]:
        """Return the messages of `input`, in the form of chat completions. Raises ConfigError with an item's index."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        return _joined_calls(_message(item, index) for index, item in enumerate(self.input))

    def to_chat(self, before: list[dict[str, Any]]) -> ChatBody:
        """Return the chat request. Raises ConfigError or pydantic's ValidationError.

        before  the messages of the conversation so far, without instructions
        """
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        logprobs = _LOGPROBS in (self.include or ()) or bool(self.top_logprobs)
        format_ = self.text.format if self.text is not None else None
        return ChatBody(
            model=self.model,
            messages=_one_system([*system, *before, *self.to_messages()]),
            stream=bool(self.stream),
            max_completion_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            logprobs=logprobs,
            top_logprobs=(self.top_logprobs or 0) if logprobs else None,
            response_format=format_,
            tools=self.read_tools.functions or None,
            tool_choice=self.read_tools.choice(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning_effort=self.reasoning.effort if self.reasoning is not None else None,
        )

    def echoed(self) -> dict[str, Any]:
        """Return the fields of the body that a response object repeats."""
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "reasoning": {"effort": self.reasoning.effort if self.reasoning else None, "summary": None},
            "store": self.store is not False,
            "background": bool(self.background),
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "text": {"format": (self.text.format if self.text else None) or {"type": "text"}},
            "tool_choice": "auto" if self.tool_choice is None else self.tool_choice,
            "tools": self.read_tools.shown,
            "truncation": self.truncation or "disabled",
            "metadata": self.metadata or {},
            "user": self.user,
        }


def output_messages(output: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the output items of a response as messages, for the turn after it."""
    return _joined_calls(_message(item, index) for index, item in enumerate(output))


def _message(item: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return an input item as a message; a reasoning item as an assistant's message without content."""
    kind = item.get("type") or "message"
    match kind:
        case "message":
            role = item.get("role")
            if role not in ("user", "assistant", "system", "developer"):
                raise ConfigError(f"input[{index}] has role {role!r}; give user, assistant, system or developer")
            return {"role": "system" if role == "developer" else role, "content": _content(item.get("content"), index)}
        case "function_call" | "custom_tool_call":
            arguments = item.get("arguments") or "{}"
            if kind == "custom_tool_call":
                arguments = json.dumps({"input": item.get("input")})
            name = Origin(str(item.get("name")), item.get("namespace")).function
            function = {"name": name, "arguments": arguments}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            return {"role": "assistant", "content": "", "tool_calls": [call]}
        case "function_call_output" | "custom_tool_call_output":
            output = item.get("output")
            content = output if isinstance(output, str | list) else json.dumps(output)
            return {"role": "tool", "tool_call_id": item.get("call_id"), "content": _content(content, index)}
        case "reasoning":
            text = _text(objects_of(item.get("content"), f"input[{index}]", "content"))
            return {"role": "assistant", "content": "", "reasoning": text}
    raise ConfigError(
        f"input[{index}] has type {kind!r}; this server reads message, reasoning, function_call, custom_tool_call and "
        "the outputs of both"
    )


def _content(content: Any, index: int) -> Any:
    if not isinstance(content, list):
        return content
    parts: list[dict[str, Any]] = []
    for part in content:
        match part:
            case {"type": "input_text" | "output_text" | "text" | "summary_text", "text": str(text)}:
                parts.append({"type": "text", "text": text})
            case {"type": "refusal", "refusal": str(text)}:
                parts.append({"type": "text", "text": text})
            case {"type": str()} if media_part(part, f"input[{index}]") is not None:
                parts.append(part)
            case _:
                kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
                raise ConfigError(
                    f"input[{index}] has a part of type {kind!r}; parts are input_text, output_text and input_image"
                )
    return parts


def _joined_calls(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join the items of one assistant's turn, thinking, text and calls: templates render it as one message."""
    joined: list[dict[str, Any]] = []
    for message in messages:
        last = joined[-1] if joined and joined[-1]["role"] == message["role"] == "assistant" else None
        if last is not None and message.get("tool_calls"):
            joined[-1] = {**last, "tool_calls": [*last.get("tool_calls", ()), *message["tool_calls"]]}
        elif last is not None and last.get("reasoning") and not last["content"] and "tool_calls" not in last:
            joined[-1] = {**message, "reasoning": last["reasoning"]}
        else:
            joined.append(message)
    return joined


def _one_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join system messages at the start into one: most chat templates render only one."""
    count = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    if count < 2:
        return messages
    texts = [_text(message["content"]) for message in messages[:count]]
    return [{"role": "system", "content": "\n\n".join(texts)}, *messages[count:]]


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(str(part.get("text") or "") for part in content or ())
