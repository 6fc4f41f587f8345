"""Chat messages and their parts. Every adapter converts its framework's messages to and from these."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from graftlm.core.errors import ConfigError, shortened
from graftlm.core.media.limits import IMAGE_PARTS, VIDEO_PARTS
from graftlm.core.media.loading import media_type


@dataclass(frozen=True)
class TextPart:
    """A text part of a multi-part message."""

    text: str


@dataclass(frozen=True)
class ImagePart:
    """A picture.

    image      a path, a URL, a data URL, bytes, a Pillow image, an array or a tensor
    mime_type  the type as the caller states it; the file's first bytes have precedence
    detail     "low", "high" or "auto", which endpoints get; local models have no use for it
    mm_processor_kwargs  options of the model's processor for this picture, such as {"max_pixels": 200704}; None: the
               runtime's
    """

    image: Any
    mime_type: str | None = None
    detail: str | None = None
    mm_processor_kwargs: Mapping[str, Any] | None = field(default=None, hash=False)

    def __repr__(self) -> str:
        return f"ImagePart({described(self.image)})"


@dataclass(frozen=True)
class VideoPart:
    """A video; the model sees `num_frames` evenly spaced frames of it.

    video      a path, a URL, a data URL, bytes, a list of pictures, or an array of frames
    fps        frames a second of a video that is given as frames
    mime_type  the type as the caller states it; the file's first bytes have precedence
    """

    video: Any
    num_frames: int | None = None
    fps: float | None = None
    mime_type: str | None = None

    def __repr__(self) -> str:
        return f"VideoPart({described(self.video)}, num_frames={self.num_frames})"


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

    @property
    def has_media(self) -> bool:
        """Return True if the message holds an image or a video."""
        return not isinstance(self.content, str) and any(not isinstance(part, TextPart) for part in self.content)


def to_messages(messages: Iterable[Message | Mapping[str, Any]]) -> list[Message]:
    """Read messages given as `Message` or as dicts in the form of the OpenAI API.

    Raises: ConfigError with the message's index for anything else.
    """
    normal = [_to_message(message, index) for index, message in enumerate(messages)]
    if not normal:
        raise ConfigError("the list of messages is empty; give at least one message")
    return normal


def to_template_dicts(
    messages: Iterable[Message], *, multimodal: bool = False, model_name: str = "the model"
) -> list[dict[str, Any]]:
    """Return the dicts that Hugging Face chat templates read. Parts that are no text have their type alone.

    Raises: ConfigError for an image or a video unless `multimodal`. It names the message and `model_name`.
    """
    return [_to_template_dict(message, index, multimodal, model_name) for index, message in enumerate(messages)]


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
        tool_calls=tuple(
            _to_tool_call(call, where) for call in list_of(message.get("tool_calls"), where, "tool_calls")
        ),
        tool_call_id=message.get("tool_call_id"),
        name=message.get("name"),
        thinking=str(message.get("reasoning_content") or message.get("reasoning") or ""),
    )


def list_of(value: Any, where: str, name: str) -> Sequence[Any]:
    """Return a list that a request gives as field `name`, () for none. Raises ConfigError for anything else."""
    if value is None or isinstance(value, list | tuple):
        return value or ()
    raise ConfigError(f"{where} has {name} of type {type(value).__name__}; give a list")


def objects_of(value: Any, where: str, name: str) -> Sequence[Mapping[str, Any]]:
    """Return a list of objects that a request gives as field `name`, () for none. Raises ConfigError otherwise."""
    found = list_of(value, where, name)
    for one in found:
        if not isinstance(one, Mapping):
            raise ConfigError(f"{where} has {type(one).__name__} in {name}; give objects")
    return found


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
        if part.get("type") in ("text", "input_text", "output_text") and isinstance(part.get("text"), str):
            return TextPart(part["text"])
        if (media := media_part(part, where)) is not None:
            return media
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind == "text":
        raise ConfigError(f"{where} has the part {str(part)[:80]}; give {{'type': 'text', 'text': ...}}")
    raise ConfigError(f"{where} has a part of type {kind!r}; parts are text, image_url, image, video_url and video")


def media_part(part: Mapping[str, Any], where: str) -> ImagePart | VideoPart | None:
    """Read a picture or a video in the form of any client; None for a part of another type.

    Forms: OpenAI's `image_url`, `video_url` and `input_image`; `image` and `video` with the object, `url`, `path`,
    `base64` or `data`; Anthropic's `source`.

    Raises: ConfigError, beginning with `where`, for a part without its content, for files of a provider, which only
    their id names, and for audio and documents.
    """
    kind = part.get("type")
    if kind in IMAGE_PARTS:
        content, mime_type, detail = _content_of(part, kind, "image", where)
        options = part.get("mm_processor_kwargs")
        if options is not None and not isinstance(options, Mapping):
            raise ConfigError(f"{where} has mm_processor_kwargs {shortened(options)}; give an object of options")
        return ImagePart(content, mime_type, detail, options)
    if kind in VIDEO_PARTS:
        content, mime_type, _ = _content_of(part, kind, "video", where)
        return VideoPart(content, part.get("num_frames"), part.get("fps"), mime_type)
    if kind in _NOT_READ:
        raise ConfigError(f"{where} holds a part of type {kind!r}; models here read text, images and videos: remove it")
    return None


_NOT_READ = ("audio", "input_audio", "audio_url", "file", "input_file", "document", "text-plain")


def _content_of(part: Mapping[str, Any], kind: str, noun: str, where: str) -> tuple[Any, str | None, str | None]:
    """Return the content of a picture or a video, its stated type, and `detail`."""
    given = part.get("source") or part.get(f"{noun}_url") or part
    if isinstance(given, str):
        given = {"url": given}
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where} has the {kind} {described(given)}; give {{'type': {kind!r}, {kind!r}: ...}}")
    mime_type = given.get("media_type") or given.get("mime_type") or part.get("mime_type")
    extras = part.get("extras")  # of LangChain's blocks
    detail = (
        given.get("detail") or part.get("detail") or (extras.get("detail") if isinstance(extras, Mapping) else None)
    )
    if mime_type is not None and not isinstance(mime_type, str):
        raise ConfigError(f"{where} states the type {mime_type!r} of its {noun}; give a text such as 'image/png'")
    if detail is not None and detail not in _DETAILS:
        raise ConfigError(f"{where} asks for detail {detail!r}; use {', '.join(_DETAILS)}")
    for name in (noun, "url", "path", "base64", "data"):
        content = given.get(name)
        if content is None or (isinstance(content, str) and not content):
            continue
        if name in ("base64", "data"):
            content = data_url(content, mime_type, noun, where)
        return content, mime_type, detail
    for name in ("file_id", "id"):
        if given.get(name):
            raise ConfigError(
                f"{where} names its {noun} by the file id {shortened(given[name])}, which no model here can look up; "
                "send its bytes, as base64 or a data URL"
            )
    raise ConfigError(f"{where} has a part of type {kind!r} without its {noun}; give {_EXAMPLE[noun]}")


_DETAILS = ("auto", "low", "high", "original")
_EXAMPLE = {
    "image": "{'type': 'image_url', 'image_url': {'url': 'data:image/png;base64,...'}}",
    "video": "{'type': 'video_url', 'video_url': {'url': 'data:video/mp4;base64,...'}}",
}


def data_url(data: Any, mime_type: str | None, noun: str, where: str) -> Any:
    """Return the data URL of base64 text, as text or as ASCII bytes. The type is found where it is not stated.

    Raises: ConfigError, beginning with `where`, for other values.
    """
    if isinstance(data, bytes | bytearray):
        data = bytes(data).decode("ascii", "replace")
    if not isinstance(data, str):
        raise ConfigError(f"{where} has an {noun} with data of type {type(data).__name__}; give base64 text")
    if data[:5].lower() == "data:":
        return data
    if mime_type is None:
        with suppress(ValueError):
            mime_type = media_type(base64.b64decode(data[:24]))
    return f"data:{mime_type or _UNKNOWN_TYPE[noun]};base64,{data}"


_UNKNOWN_TYPE = {"image": "image/png", "video": "video/mp4"}


def described(value: Any) -> str:
    """Return a short description of a picture or a video for messages; never its bytes."""
    if isinstance(value, bytes | bytearray | memoryview):
        return f"{len(value):,} bytes"
    if isinstance(value, str) and value[:5].lower() == "data:":
        return f"data URL of {len(value):,} characters"
    if isinstance(value, str | os.PathLike):
        return shortened(os.fspath(value), 60)
    return type(value).__name__


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
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where} calls {function['name']!r} with broken JSON as arguments: {error}") from error
    if not isinstance(arguments, Mapping):
        raise ConfigError(f"{where} calls {function['name']!r} with arguments that are no JSON object: {arguments!r}")
    return ToolCall(id=str(call.get("id") or ""), name=function["name"], arguments=dict(arguments))


def _to_template_dict(message: Message, index: int, multimodal: bool, model_name: str) -> dict[str, Any]:
    content = _template_content(message, index, multimodal, model_name)
    return chat_dict(message, content, lambda arguments: arguments)


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


def _template_content(message: Message, index: int, multimodal: bool, model_name: str) -> str | list[dict[str, Any]]:
    if not message.has_media:
        return message.text
    parts: list[dict[str, Any]] = []
    for part in message.content:
        if isinstance(part, str | TextPart):
            parts.append({"type": "text", "text": part if isinstance(part, str) else part.text})
            continue
        noun, value = ("image", part.image) if isinstance(part, ImagePart) else ("video", part.video)
        if not multimodal:
            holds = f"message {index} ({message.role}) holds {'an' if noun == 'image' else 'a'} {noun}"
            raise ConfigError(
                f"{holds} ({described(value)}), but {model_name} reads text only; load a vision model, or remove it"
            )
        parts.append({"type": noun})
    return parts
