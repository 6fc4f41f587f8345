"""Media: the pictures and videos of requests, read and processed on threads of their own within a budget of bytes.

A string of a request is never a path of this machine, unless the operator allows its folder. Requests of text pass by.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graftlm.adapters.server.http.errors import ApiError
from graftlm.core.chat.messages import ContentPart, ImagePart, Message, VideoPart, to_messages
from graftlm.core.errors import ConfigError, shortened
from graftlm.core.grammar.masks.workers import lower_priority
from graftlm.core.media.access import MediaAccess
from graftlm.core.media.loading import MediaLimits, is_url

if TYPE_CHECKING:
    from graftlm.adapters.server.endpoints.chat import ChatBody
    from graftlm.adapters.server.settings import ServerSettings
    from graftlm.core.chat.tool_format import ToolFormat
    from graftlm.core.request import Request
    from graftlm.core.runtime import Runtime


NICE = 10
"""Priority of the threads that decode: the engine and the event loop get the cores first."""


def holds_media(messages: Sequence[Any]) -> bool:
    """Return True if a message, as a client sent it, has a part that is no text."""
    parts = (part for message in messages for part in _parts(message))
    return any(isinstance(part, Mapping) and part.get("type") not in _TEXT for part in parts)


_TEXT = frozenset(("text", "input_text", "output_text", "refusal"))


def frames_of_videos(media_io_kwargs: Mapping[str, Any] | None) -> int | None:
    """Return the frames of each video, in vLLM's form. Raises ConfigError for other options of videos."""
    given = dict(media_io_kwargs or {})
    video = given.pop("video", None) or {}
    if other := [*given, *(f"video.{name}" for name in video if name != "num_frames")]:
        raise ConfigError(f"media_io_kwargs.{other[0]} is unknown here; known: video.num_frames")
    count = video.get("num_frames")
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
        raise ConfigError(f"media_io_kwargs.video.num_frames is {count!r}; give a whole number above 0")
    return count


def check_picture_options(runtime: Runtime, given: Mapping[str, Any]) -> None:
    """Raise ConfigError for options that the model's image processor does not take, with pictures or without."""
    media = runtime.tokenizer.media if runtime.endpoint is None else None
    if media is None:
        name = next(iter(given))
        where = f"{runtime.model_name} reads text only" if runtime.endpoint is None else "the model is at an endpoint"
        raise ConfigError(f"mm_processor_kwargs.{name} is {shortened(given[name])}, and {where}; leave it out")
    media.hf.options.of_request(given)


class Media:
    """Converts the requests that hold pictures or videos."""

    def __init__(self, runtime: Runtime, settings: ServerSettings) -> None:
        self._runtime = runtime
        self._most_held = settings.limits.held_media_bytes
        self._access = MediaAccess(frozenset(settings.media_hosts), tuple(map(Path, settings.media_folders)))
        # Decoding competes with the engine for cores; the processor's threads inherit the priority.
        num_workers = max(1, min(4, (os.cpu_count() or 1) // 4))
        self._workers = ThreadPoolExecutor(num_workers, "graftlm media", partial(lower_priority, NICE))
        self._readers = ThreadPoolExecutor(4, "graftlm media source")  # wait for hosts and disks
        self._arriving = 0  # bytes of requests that are converted
        self._items: weakref.WeakSet[Any] = weakref.WeakSet()  # processed pictures of requests, and those kept

    @property
    def num_held(self) -> int:
        """Bytes of the media of requests that arrive, wait or run, and of those that the processor keeps."""
        return self._arriving + sum(int(item.num_bytes) for item in list(self._items))

    async def prepared(self, body: ChatBody) -> tuple[Request, ToolFormat | None]:
        """Return the native request, its prompt processed, and the format of its calls. Raises GraftError, ApiError."""
        size = sum(_num_chars(part) for message in body.messages for part in _parts(message))
        if self._arriving and self.num_held + size > self._most_held:
            message = f"pictures of open requests fill the server's {self._most_held:,} bytes for them"
            message += "; try again later"
            raise ApiError(429, message, kind="rate_limit_error", code="too_much_media", retry_after=1)
        loop = asyncio.get_running_loop()
        self._arriving += size
        try:
            named = self._access.hosts or self._access.folders
            read = partial(self.read, body.messages, body.frames_of_videos, body.mm_processor_kwargs)
            messages = await loop.run_in_executor(self._readers if named else self._workers, read)
            body = body.model_copy(update={"messages": messages})
            return await loop.run_in_executor(self._workers, self._processed, body)
        finally:
            self._arriving -= size

    def read(
        self,
        messages: Sequence[Any],
        num_frames: int | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> list[Message]:
        """Return messages whose pictures and videos are bytes. Raises ConfigError that names the message.

        num_frames  frames of videos that state none
        options     of the processor, for pictures that state none

        An endpoint is sent URLs as they came, since it has a rule of its own for them.
        """
        native = to_messages(messages)
        return [self._read(one, i, num_frames, options) if one.has_media else one for i, one in enumerate(native)]

    def _read(self, message: Message, index: int, num_frames: int | None, options: Mapping[str, Any] | None) -> Message:
        limits: MediaLimits = getattr(self._runtime.config, "media", None) or MediaLimits()
        parts: list[ContentPart] = []
        for part in message.content:
            assert not isinstance(part, str)
            try:
                if isinstance(part, ImagePart):
                    image = self._content(part.image, "picture", limits.max_image_bytes, limits)
                    own = part.mm_processor_kwargs
                    part = replace(part, image=image, mm_processor_kwargs=options if own is None else own)
                elif isinstance(part, VideoPart):
                    if options:
                        raise ConfigError("mm_processor_kwargs are for pictures; a video has num_frames alone")
                    video = self._content(part.video, "video", limits.max_video_bytes, limits)
                    part = replace(part, video=video, num_frames=part.num_frames or num_frames)
            except ConfigError as error:
                raise ConfigError(f"message {index}: {error}") from error
            parts.append(part)
        return replace(message, content=tuple(parts))

    def _content(self, content: Any, kind: str, limit: int, limits: MediaLimits) -> str | bytes:
        if not isinstance(content, str):
            raise ConfigError(f"the {kind} is a {type(content).__name__}; send a data URL")
        if self._runtime.endpoint is not None and (is_url(content) or content[:5].lower() == "data:"):
            return content
        return self._access.read(content, kind, limit, limits)

    def _processed(self, body: ChatBody) -> tuple[Request, ToolFormat | None]:
        request, form, _ = body.convert(self._runtime)
        if self._runtime.endpoint is None:
            prompt = self._runtime.processor.encode(request.prompt, request.tools)
            self._items.update(item for span in prompt.spans if (item := getattr(span.values, "item", None)))
            request = replace(request, prompt=prompt, tools=None)
        return request, form


def _parts(message: Mapping[str, Any]) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _num_chars(part: Any) -> int:
    """Return the characters of the longest text in a part."""
    if isinstance(part, Mapping):
        return max(map(_num_chars, part.values()), default=0)
    return len(part) if isinstance(part, str) else 0
