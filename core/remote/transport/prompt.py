"""RemotePrompt: the prompt of a model behind an API."""

from __future__ import annotations

import base64
import json
import mimetypes
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from graftlm.core.chat.messages import ImagePart, Message, TextPart, chat_dict, to_messages
from graftlm.core.errors import ConfigError
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
            if prompt.spans:
                raise ConfigError("the prompt has spans of other values than text, which no endpoint takes")
            prompt = prompt.ids
        if isinstance(prompt, Mapping) or not hasattr(prompt, "__len__"):
            raise ConfigError(f"prompt is a {type(prompt).__name__}; give text, token ids or a list of messages")
        if len(prompt) and not isinstance(prompt[0], Mapping | Message):
            return cls(ids=tuple(int(i) for i in prompt))
        messages = tuple(message_dict(message) for message in to_messages(prompt))
        return cls(messages=messages, tools=tuple(tools or ()), tool_fields=fields or {})

    def plus(self, text: str) -> RemotePrompt:
        """Return the prompt with `text` appended to its open turn."""
        return replace(self, text=self.text + text)

    def with_turns(self, *turns: Mapping[str, Any]) -> RemotePrompt:
        """Return the chat with further turns, none of them open."""
        return replace(self, messages=(*(self.messages or ()), *turns), text="")

    @property
    def num_bytes(self) -> int:
        """The length of all text, for estimates."""
        said = sum(len(str(message.get("content", "")).encode()) for message in self.messages or ())
        return said + len(self.text.encode()) + 4 * len(self.ids or ())


def message_dict(message: Message) -> dict[str, Any]:
    """Return a message in the form of the OpenAI API, its media as data URLs and its tool calls' arguments as text."""
    is_text = isinstance(message.content, str) or all(isinstance(part, TextPart) for part in message.content)
    content = message.text if is_text else [_part(part) for part in message.content]
    return chat_dict(message, content, json.dumps)


def _part(part: Any) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    if isinstance(part, ImagePart):
        return {"type": "image_url", "image_url": {"url": _image_url(part.image)}}
    raise ConfigError("a message holds a video, which the OpenAI API does not take; give its frames as images")


def _image_url(image: Any) -> str:
    if isinstance(image, str) and image.startswith(("http://", "https://", "data:")):
        return image
    if isinstance(image, str | os.PathLike):
        path = Path(image)
        if not path.is_file():
            raise ConfigError(f"the image {os.fspath(path)!r} is no file; give a path, a URL or bytes")
        kind, data = mimetypes.guess_type(path.name)[0] or "image/png", path.read_bytes()
    elif isinstance(image, bytes):
        kind, data = "image/png", image
    else:
        raise ConfigError(f"an image is a {type(image).__name__}; for an endpoint give a path, a URL or bytes")
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
