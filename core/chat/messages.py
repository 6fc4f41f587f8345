"""Chat messages and their parts. Every adapter converts its framework's messages to and from these."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from graftlm.core.errors import ConfigError


@dataclass(frozen=True)
class TextPart:
    """A text part of a multi-part message."""

    text: str


@dataclass(frozen=True)
class ImagePart:
    """An image: a path, a URL, bytes, or an object that the model's processor accepts."""

    image: Any


@dataclass(frozen=True)
class VideoPart:
    """A video; the model sees `num_frames` evenly spaced frames of it."""

    video: Any
    num_frames: int | None = None


ContentPart = TextPart | ImagePart | VideoPart


@dataclass(frozen=True)
class ToolCall:
    """One tool call of the model. `arguments` is decoded JSON."""

    id: str
    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Message:
    """One turn of a chat. In a "tool" message `tool_call_id` is the id of the call that it answers.

    thinking  of an assistant's turn, for chat templates that render it
    """

    role: str
    content: str | tuple[ContentPart, ...] = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    thinking: str = ""

    @property
    def text(self) -> str:
        """All text of the message, its parts joined without a separator."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content if isinstance(part, TextPart))


def to_messages(messages: Iterable[Message | Mapping[str, Any]]) -> list[Message]:
    """Read messages given as `Message` or as dicts in the form of the OpenAI API.

    Raises: ConfigError with the message's index for anything else.
    """
    normal = [_to_message(message, index) for index, message in enumerate(messages)]
    if not normal:
        raise ConfigError("the list of messages is empty; give at least one message")
    return normal


def to_template_dicts(messages: Iterable[Message], *, multimodal: bool = False) -> list[dict[str, Any]]:
    """Return the dicts that Hugging Face chat templates read.

    Raises: ConfigError for an image or a video unless `multimodal`.
    """
    return [_to_template_dict(message, multimodal) for message in messages]


def _to_message(message: Message | Mapping[str, Any], index: int) -> Message:
    if isinstance(message, Message):
        return message
    where = f"message {index}"
    if not isinstance(message, Mapping):
        raise ConfigError(f"{where} is a {type(message).__name__}; give a dict with 'role' and 'content', or a Message")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ConfigError(f"{where} has role {role!r}; give 'system', 'user', 'assistant' or 'tool'")
    if "content" not in message and role != "assistant":
        raise ConfigError(f"{where} has no content; give text or a list of parts as 'content'")
    return Message(
        role=role,
        content=_to_content(message.get("content"), where),
        tool_calls=tuple(_to_tool_call(call, where) for call in message.get("tool_calls") or ()),
        tool_call_id=message.get("tool_call_id"),
        name=message.get("name"),
        thinking=str(message.get("reasoning_content") or message.get("reasoning") or ""),
    )


def _to_content(content: Any, where: str) -> str | tuple[ContentPart, ...]:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, Mapping) or not isinstance(content, Iterable):
        raise ConfigError(f"{where} has content of type {type(content).__name__}; give text or a list of parts")
    return tuple(_to_part(part, where) for part in content)


def _to_part(part: Any, where: str) -> ContentPart:
    if isinstance(part, TextPart | ImagePart | VideoPart):
        return part
    if isinstance(part, str):
        return TextPart(part)
    if isinstance(part, Mapping):
        match part:
            case {"type": "text", "text": str(text)}:
                return TextPart(text)
            case {"type": "image_url", "image_url": {"url": url}} | {"type": "image_url", "image_url": str(url)}:
                return ImagePart(url)
            case {"type": "image", "image": image} | {"type": "image", "url": image} | {"type": "image", "path": image}:
                return ImagePart(image)
            case {"type": "video", "video": video} | {"type": "video", "url": video} | {"type": "video", "path": video}:
                return VideoPart(video, part.get("num_frames"))
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind in ("text", "image_url", "image", "video"):
        raise ConfigError(f"{where} has the part {str(part)[:80]}; give {{'type': {kind!r}, {kind!r}: ...}}")
    raise ConfigError(f"{where} has a part of type {kind!r}; parts are text, image_url, image and video")


def _to_tool_call(call: Any, where: str) -> ToolCall:
    if isinstance(call, ToolCall):
        return call
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ConfigError(f"{where} has a tool call without a name: {call!r}")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError as error:
            raise ConfigError(f"{where} calls {function['name']!r} with broken JSON as arguments: {error}") from error
    if not isinstance(arguments, Mapping):
        raise ConfigError(f"{where} calls {function['name']!r} with arguments that are no JSON object: {arguments!r}")
    return ToolCall(id=str(call.get("id") or ""), name=function["name"], arguments=dict(arguments))


def _to_template_dict(message: Message, multimodal: bool) -> dict[str, Any]:
    return chat_dict(message, _template_content(message, multimodal), lambda arguments: arguments)


def chat_dict(message: Message, content: Any, write: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """Return a message in the form of the OpenAI API.

    content  the message's content, in that form
    write    converts the arguments of a tool call
    """
    result: dict[str, Any] = {"role": message.role, "content": content}
    if message.tool_calls:
        result["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": write(call.arguments)}}
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        result["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        result["name"] = message.name
    if message.thinking:
        result["reasoning_content"] = message.thinking
    return result


def _template_content(message: Message, multimodal: bool) -> str | list[dict[str, Any]]:
    if isinstance(message.content, str) or all(isinstance(part, TextPart) for part in message.content):
        return message.text
    if not multimodal:
        kind = "an image" if any(isinstance(part, ImagePart) for part in message.content) else "a video"
        raise ConfigError(f"a {message.role} message holds {kind}, but the model reads text only; load a vision model")
    parts: list[dict[str, Any]] = []
    for part in message.content:
        match part:
            case TextPart(text):
                parts.append({"type": "text", "text": text})
            case ImagePart(image):
                parts.append({"type": "image", "image": image})
            case VideoPart(video):
                parts.append({"type": "video", "video": video})
    return parts
