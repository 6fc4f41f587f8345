"""RemotePrompt: the prompt of a model behind an API."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from graftlm.core.chat.messages import ImagePart, Message, TextPart, chat_dict, to_messages
from graftlm.core.errors import ConfigError
from graftlm.core.media.loading import (
    LoadedImage,
    MediaLimits,
    is_url,
    load_image,
    media_type,
    read_image,
    read_source,
)
from graftlm.core.prompt_input import PromptInput


@dataclass(frozen=True)
class RemotePrompt:
    """Text for /completions, or the closed turns of a chat.

    text      the whole text; with `messages` the text of the assistant's open turn, or "".
    messages  in the shape of the OpenAI API; None for plain text.
    ids       token ids in place of `text`.
    tools     functions that the model may call;  tool_fields: further fields, such as tool_choice.
    """

    text: str = ""
    messages: tuple[Mapping[str, Any], ...] | None = None
    ids: tuple[int, ...] | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_fields: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls, prompt: Any, tools: Sequence[Mapping[str, Any]] | None = None, fields: Mapping[str, Any] | None = None
    ) -> RemotePrompt:
        """Read a request's prompt; raise ConfigError for prompts that no API supports."""
        if isinstance(prompt, str):
            if not prompt:
                raise ConfigError("the prompt is empty; give some text")
            return cls(text=prompt)
        if isinstance(prompt, PromptInput):
            if prompt.spans or prompt.modules:
                raise ConfigError("the prompt has other values than text, or modules, which no endpoint takes")
            prompt = prompt.ids
        if isinstance(prompt, Mapping) or not hasattr(prompt, "__len__"):
            raise ConfigError(f"prompt is a {type(prompt).__name__}; give text, token ids or a list of messages")
        if len(prompt) and not isinstance(prompt[0], Mapping | Message):
            return cls(ids=tuple(int(i) for i in prompt))
        messages = tuple(message_dict(message, index) for index, message in enumerate(to_messages(prompt)))
        return cls(messages=messages, tools=tuple(tools or ()), tool_fields=fields or {})

    def plus(self, text: str) -> RemotePrompt:
        """Return the prompt with `text` appended to its open turn."""
        return replace(self, text=self.text + text)

    def with_turns(self, *turns: Mapping[str, Any]) -> RemotePrompt:
        """Return the chat with further turns, none of them open."""
        return replace(self, messages=(*(self.messages or ()), *turns), text="")

    @property
    def num_bytes(self) -> int:
        """The length of all text, for estimates; pictures and videos count _MEDIA_BYTES each."""
        said = sum(_num_bytes(message.get("content", "")) for message in self.messages or ())
        return said + len(self.text.encode()) + 4 * len(self.ids or ())


_MEDIA_BYTES = 4 * 765  # a picture of 1,024x1,024 is 765 tokens at OpenAI


def _num_bytes(content: Any) -> int:
    if isinstance(content, list):
        return sum(_num_bytes(part["text"]) if part.get("type") == "text" else _MEDIA_BYTES for part in content)
    return len(str(content).encode())


def message_dict(message: Message, index: int = 0) -> dict[str, Any]:
    """Return a message in the form of the OpenAI API, its media as URLs and its tool calls' arguments as text.

    index  the message's number, for errors
    """
    where = f"message {index} ({message.role})"
    content = [media_dict(part, where) for part in message.content] if message.has_media else message.text
    return chat_dict(message, content, json.dumps)


def media_dict(part: Any, where: str) -> dict[str, Any]:
    """Return a part of a message in the form of the OpenAI API. Raises ConfigError, beginning with `where`."""
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    if isinstance(part, ImagePart):
        if part.mm_processor_kwargs:
            raise ConfigError(
                f"{where} has a picture with mm_processor_kwargs, which an endpoint takes for all pictures; set them "
                "in extra_body of the runtime"
            )
        image = {"url": _url(part.image, part.mime_type, "picture", where)}
        if part.detail is not None:
            image["detail"] = part.detail
        return {"type": "image_url", "image_url": image}
    if part.num_frames is not None:
        raise ConfigError(
            f"{where} asks for {part.num_frames} frames of a video, and an endpoint chooses them itself; leave "
            "num_frames out, or send the frames as images"
        )
    return {"type": "video_url", "video_url": {"url": _url(part.video, part.mime_type, "video", where)}}


def _url(content: Any, mime_type: str | None, kind: str, where: str) -> str:
    """Return a picture's or a video's URL: as it came, or a data URL of the unchanged bytes with their own type.

    Pixels of a picture become a PNG.
    """
    if isinstance(content, str) and (is_url(content) or content[:5].lower() == "data:"):
        return content
    try:
        if kind == "picture":
            encoded = read_image(content, limits=_LIMITS)
            data = encoded if isinstance(encoded, bytes) else _png(load_image(encoded, limits=_LIMITS))
        else:
            found = read_source(content, kind, _LIMITS.max_video_bytes, _LIMITS, False)
            if found is None:
                raise ConfigError("a video for an endpoint is a file; give its path, bytes or URL, or frames as images")
            data = found
        found_type = media_type(data) or mime_type
        if found_type is None:
            raise ConfigError(f"the {kind} is {len(data):,} bytes of an unknown type; state its mime_type")
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    return f"data:{found_type};base64,{base64.b64encode(data).decode()}"


_LIMITS = MediaLimits()


def _png(image: LoadedImage) -> bytes:
    if image.encoded is not None:
        return image.encoded
    file = io.BytesIO()
    image.picture.save(file, "PNG")
    return file.getvalue()
